"""What an engine can be asked beside requests: what it counts and has cached, to forget that, to load adapters."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from ipc.codec import WireError
from ipc.messages import (
    AdapterAnswer,
    CacheProbed,
    FrontendMessage,
    GetStats,
    LoadAdapter,
    PrefixCacheWasReset,
    ProbeCache,
    ResetPrefixCache,
    Stats,
    UnloadAdapter,
)
from ipc.stats import EngineStats, PrefixCacheReset
from ipc.vocabulary import AdapterInfo, CacheProbe, EngineRequest, RequestError

from .engine_errors import EngineUnavailableError, RequestRefusedError
from .in_flight import why_unsendable

T = TypeVar("T")
Answer: TypeAlias = Stats | PrefixCacheWasReset | CacheProbed | AdapterAnswer


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """An engine as it told about itself. Its counters began with its `epoch`.

    `dropped_messages`: what it received and did not use, by reason.
    """

    epoch: int
    stats: EngineStats
    dropped_messages: dict[str, int]


class EngineCalls:
    """Questions to one engine. Every call ends: with its answer, when the engine is lost, or when its time is over.

    All raise EngineUnavailableError: there is no engine, it was lost meanwhile, it does not keep up, or it did not
    answer in time. What was asked may happen all the same.
    """

    def __init__(self, send: Callable[[FrontendMessage], None]) -> None:
        """`send` hands the engine a message. Raises EngineUnavailableError, or WireError where that cannot be sent."""
        self._send = send
        self._serial = itertools.count()
        self._unanswered: dict[int, asyncio.Future[Any]] = {}

    async def stats(self, timeout_s: float) -> EngineSnapshot:
        """What the engine counts, answered however long its present step takes."""
        epoch, answer = await self._call(GetStats, timeout_s)
        return EngineSnapshot(epoch, answer.stats, answer.dropped_messages)

    async def reset_prefix_cache(self, *, reset_running_requests: bool, timeout_s: float) -> PrefixCacheReset:
        """Make the engine forget every cached prefix, after its present step; see `ResetPrefixCache`."""
        _, answer = await self._call(lambda call_id: ResetPrefixCache(call_id, reset_running_requests), timeout_s)
        result: PrefixCacheReset = answer.result
        return result

    async def probe_cache(
        self, request: EngineRequest, *, explain: bool = False, relative_end: int = 0, timeout_s: float
    ) -> CacheProbe:
        """What `request` would find in the engine's prefix cache, after its present step; see `ProbeCache`.

        Raises:
            RequestRefusedError: the request could never run there, or cannot be sent.
        """
        try:
            _, answer = await self._call(lambda call_id: ProbeCache(call_id, request, explain, relative_end), timeout_s)
        except WireError as error:
            raise RequestRefusedError(why_unsendable(request, error)) from error
        probe: CacheProbe | None = answer.probe
        return _given(probe, answer.error)

    async def load_adapter(
        self, name: str, path: str, *, replaces: bool = False, digest: str | None = None, timeout_s: float
    ) -> AdapterInfo:
        """Let requests ask the engine for the LoRA adapter at `path` as `name`; see `LoadAdapter`.

        Raises:
            RequestRefusedError: the `reason` and `param` of its error are those of `AdapterAnswer`.
        """
        return await self._change_adapter(
            lambda call_id: LoadAdapter(call_id, name, path, replaces, digest), timeout_s=timeout_s
        )

    async def unload_adapter(self, name: str, *, timeout_s: float) -> AdapterInfo:
        """Let no further request ask the engine for the LoRA adapter `name`. Raises as `load_adapter`."""
        return await self._change_adapter(lambda call_id: UnloadAdapter(call_id, name), timeout_s=timeout_s)

    def take(self, epoch: int, answer: Answer) -> None:
        """What the engine of this epoch has answered. Who waits no longer is passed over."""
        if (answered := self._unanswered.get(answer.call_id)) is not None and not answered.done():
            answered.set_result((epoch, answer))

    def fail_all(self, error: EngineUnavailableError) -> None:
        """The engine is lost."""
        for answered in self._unanswered.values():
            if not answered.done():
                answered.set_exception(error)

    async def _change_adapter(
        self, make: Callable[[int], LoadAdapter | UnloadAdapter], *, timeout_s: float
    ) -> AdapterInfo:
        _, answer = await self._call(make, timeout_s)
        adapter: AdapterInfo | None = answer.adapter
        return _given(adapter, answer.error)

    async def _call(self, make: Callable[[int], FrontendMessage], timeout_s: float) -> tuple[int, Any]:
        """Send what `make` makes of a call id; the engine's epoch, and what it answers to that message."""
        call_id = next(self._serial)
        answered = self._unanswered[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(make(call_id))
            async with asyncio.timeout(timeout_s):
                return await answered
        except TimeoutError:
            raise EngineUnavailableError(f"the engine did not answer within {timeout_s:g} s") from None
        finally:
            del self._unanswered[call_id]


def _given(result: T | None, error: RequestError | None) -> T:
    """What an answer has, or why it has nothing, as RequestRefusedError."""
    if result is None:
        raise RequestRefusedError(error or RequestError("internal", "the engine gave no answer"))
    return result
