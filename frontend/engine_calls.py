"""Questions to an engine that are waiting for their answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ipc.stats import EngineStats

from .engine_errors import EngineUnavailableError


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """An engine as it told about itself. Its counters began with its `epoch`.

    `dropped_messages`: what it received and did not use, by reason.
    """

    epoch: int
    stats: EngineStats
    dropped_messages: dict[str, int]


class EngineCalls:
    """Every call ends: with its answer, when the engine is lost, or when its time is over."""

    def __init__(self) -> None:
        self._serial = itertools.count()
        self._unanswered: dict[int, asyncio.Future[Any]] = {}

    async def call(self, send: Callable[[int], None], timeout_s: float) -> Any:
        """Have `send` send a message under the call id it is given; return what `answer` gets for it.

        Raises:
            EngineUnavailableError: the engine was lost meanwhile, or did not answer within `timeout_s`.
        """
        call_id = next(self._serial)
        answered = self._unanswered[call_id] = asyncio.get_running_loop().create_future()
        try:
            send(call_id)
            async with asyncio.timeout(timeout_s):
                return await answered
        except TimeoutError:
            raise EngineUnavailableError(f"the engine did not answer within {timeout_s:g} s") from None
        finally:
            del self._unanswered[call_id]

    def answer(self, call_id: int, result: Any) -> None:
        """Give the call its result. Who waits no longer is passed over."""
        if (answered := self._unanswered.get(call_id)) is not None and not answered.done():
            answered.set_result(result)

    def fail_all(self, error: EngineUnavailableError) -> None:
        for answered in self._unanswered.values():
            if not answered.done():
                answered.set_exception(error)
