"""Callers who want the same thing at the same time wait for one computation of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Call(Generic[T]):
    task: asyncio.Task[T]
    num_waiting: int = 0


class SharedCalls(Generic[T]):
    """Runs one call per key at a time. For one event loop.

    A caller who is cancelled leaves the others' call alone; with the last one it is cancelled, too. An error reaches
    all who waited, and is not remembered.
    """

    def __init__(self) -> None:
        self._calls: dict[Hashable, _Call[T]] = {}

    def __contains__(self, key: Hashable) -> bool:
        """Whether such a call is under way."""
        return key in self._calls

    async def run(self, key: Hashable, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What `start()` returns, or what a call of the same key that is under way does."""
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = _Call(asyncio.create_task(start()))
            call.task.add_done_callback(lambda task: self._forget(key, task))
        call.num_waiting += 1
        try:
            return await asyncio.shield(call.task)
        finally:
            call.num_waiting -= 1
            if call.num_waiting == 0 and not call.task.done():
                # Forgotten now: who comes next must not join a call that is about to end.
                self._forget(key, call.task)
                call.task.cancel()

    def _forget(self, key: Hashable, task: asyncio.Task[T]) -> None:
        call = self._calls.get(key)
        if call is not None and call.task is task:
            del self._calls[key]
        if task.done() and not task.cancelled():
            task.exception()  # whoever was to hear of it may be gone
