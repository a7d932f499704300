"""Which LoRA adapters the engines of a frontend are to have: what they say, put together.

What changes in an engine that lives, somebody has asked for: it holds for all of them. An engine that was started again
has forgotten what it was given, and one that was away has missed what the others were told; both are to be repaired.
What engines were started with is each one's own, and may differ. If the same name has other weights in two of them,
those that were known first count.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ipc.vocabulary import AdapterInfo

from .engine_client import EngineClient, Occasion

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Repair:
    """What an engine is to be told about `name`: to load `adapter`, in place of another if need be; None: to unload."""

    name: str
    adapter: AdapterInfo | None


class AdapterCatalog:
    """Adapters by name. An engine has one if it has the same weights under the same name.

    Attributes:
        adapters: those that requests may ask for, whether an engine has them at the moment or not.
    """

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        self._engines = engines
        self.adapters: dict[str, AdapterInfo] = {}
        # Names whose adapters somebody has asked for, so that all engines are to have them.
        self._asked_for: set[str] = set()

    def has(self, engine: EngineClient, name: str) -> bool:
        """Whether `engine` has, as it said last, what requests for `name` ask for."""
        return _is_same(engine.loaded_adapters.get(name), self.adapters.get(name))

    def learn(self, engine: EngineClient, before: Mapping[str, AdapterInfo], occasion: Occasion) -> list[Repair]:
        """Take in what `engine` has now and had `before`; return what it must be told to have what it should."""
        now = engine.loaded_adapters
        if occasion in {"changed", "found_again"}:
            self._follow(before, now)
        else:
            for name, adapter in now.items():
                self.adapters.setdefault(name, adapter)
        if occasion == "changed":
            return []
        lacking = [name for name in self.adapters if not self.has(engine, name)]
        if occasion == "first":
            # What it was started with, or told by others, is not ours to replace.
            self._tell_differences(engine, [name for name in lacking if name in now])
            lacking = [name for name in lacking if name not in now]
        wanted = [name for name in lacking if name in self._asked_for or name in before]
        # An engine that was away kept what the others were told to unload.
        unwanted = [name for name in now if name not in self.adapters]
        return [*(Repair(name, self.adapters[name]) for name in wanted), *(Repair(name, None) for name in unwanted)]

    def is_due(self, engine: EngineClient, repair: Repair) -> bool:
        """Whether `repair` is still what `engine` must be told."""
        if repair.adapter is None:
            return repair.name in engine.loaded_adapters and repair.name not in self.adapters
        return _is_same(self.adapters.get(repair.name), repair.adapter) and not self.has(engine, repair.name)

    def give_up(self, engine: EngineClient, name: str) -> None:
        """`engine` cannot be given `name`. If no other engine has it, or had it when it was lost, what `engine` has
        under this name takes its place, or nothing.
        """
        if any(self.has(other, name) for other in self._engines):
            return
        self.forget(name)
        if name in engine.loaded_adapters:
            self.adapters[name] = engine.loaded_adapters[name]

    def ask_for(self, adapter: AdapterInfo) -> None:
        """All engines are to have it."""
        self.adapters[adapter.name] = adapter
        self._asked_for.add(adapter.name)

    def forget(self, name: str) -> None:
        """No engine is to have it."""
        self.adapters.pop(name, None)
        self._asked_for.discard(name)

    def _follow(self, before: Mapping[str, AdapterInfo], now: Mapping[str, AdapterInfo]) -> None:
        for name, adapter in before.items():
            if name not in now and _is_same(self.adapters.get(name), adapter):
                self.forget(name)
        for name, adapter in now.items():
            if not _is_same(before.get(name), adapter):
                self.ask_for(adapter)

    def _tell_differences(self, engine: EngineClient, names: Iterable[str]) -> None:
        for name in names:
            logger.warning(
                "adapter_differs engine=%d name=%r digest=%s served_digest=%s",
                engine.index,
                name,
                engine.loaded_adapters[name].digest[:12],
                self.adapters[name].digest[:12],
            )


def _is_same(one: AdapterInfo | None, other: AdapterInfo | None) -> bool:
    return one is not None and other is not None and one.digest == other.digest
