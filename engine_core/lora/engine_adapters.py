"""What an engine does with adapters: who may ask for which, and where they are computed."""

from __future__ import annotations

import os
from pathlib import Path

from engine_core.config import EngineConfig
from engine_core.errors import AdapterError, InvalidConfigError, InvalidRequestError
from engine_core.runner import Runner
from ipc.vocabulary import AdapterInfo, EngineRequest

from .adapter import Adapter
from .registry import AdapterRegistry
from .slots import AdapterSlots, no_slots

_LORA_IS_OFF = "this engine was started without enable_lora"


class EngineAdapters:
    """Of one engine, with its `lora_modules` loaded. Without `enable_lora` there are none, and who asks for one is told
    so.

    Any thread may call anything at any time, but for the slots.

    Attributes:
        slots: of the runner.

    Raises:
        InvalidConfigError: the runner has no slots for adapters, or one of `lora_modules` cannot be loaded.
    """

    def __init__(self, config: EngineConfig, runner: Runner) -> None:
        self._registry = _load_modules(config, runner) if config.enable_lora else None
        self.slots = no_slots()
        if self._registry is not None:
            self.slots = AdapterSlots(
                runner.info.num_adapter_slots,
                runner.place_adapter,
                runner.clear_adapter,
                self._registry.is_loaded,
            )

    def of_request(self, request: EngineRequest) -> Adapter | None:
        """What its `adapter` is called now.

        Raises:
            InvalidRequestError: nothing is, or the request says itself what its blocks are computed with.
        """
        if self._registry is None:
            if request.adapter:
                raise InvalidRequestError(f"adapter: {_LORA_IS_OFF}", "adapter")
            return None
        if any(span.kind == "lora" for span in request.extra_key_spans):
            raise InvalidRequestError(
                "extra_key_spans: with enable_lora, spans of the kind 'lora' are the engine's: name an `adapter`",
                "extra_key_spans",
            )
        if not request.adapter:
            return None
        adapter = self._registry.get(request.adapter)
        if adapter is None:
            raise InvalidRequestError(f"adapter: no adapter is called {request.adapter[:300]!r}", "adapter")
        return adapter

    def load(
        self, name: str, path: str | os.PathLike[str], root: Path | None, *, replaces: bool, digest: str | None
    ) -> AdapterInfo:
        """As `EngineCore.load_adapter`."""
        return self._enabled().load(name, path, root, replaces=replaces, digest=digest)

    def unload(self, name: str) -> AdapterInfo:
        """As `EngineCore.unload_adapter`."""
        return self._enabled().unload(name)

    def infos(self) -> list[AdapterInfo]:
        """Of all that are loaded, in the order in which their names came."""
        return [] if self._registry is None else self._registry.infos()

    @property
    def num_bytes(self) -> int:
        """What they weigh in host memory."""
        return 0 if self._registry is None else self._registry.num_bytes

    def _enabled(self) -> AdapterRegistry:
        if self._registry is None:
            raise AdapterError(_LORA_IS_OFF, "lora_disabled", "lora_name")
        return self._registry


def _load_modules(config: EngineConfig, runner: Runner) -> AdapterRegistry:
    if runner.info.num_adapter_slots == 0:
        raise InvalidConfigError(f"enable_lora: {runner.info.name} is computed without slots for adapters")
    registry = AdapterRegistry(runner.read_adapter, config.max_cpu_loras, runner.info.name)
    for module in config.lora_modules:
        try:
            registry.load(module.name, module.path)
        except AdapterError as error:
            raise InvalidConfigError(f"lora_modules: {module.name}={module.path}: {error}") from error
    return registry
