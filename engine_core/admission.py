"""How long the queue may get: who is refused at the door, and when it is worth knocking again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from .errors import EngineOverloadedError
from .request import Request
from .scheduler import Scheduler
from .waiting_queue import WaitingQueue, num_sequences

# Over which the speed of the queue is measured; also what a refused caller is told where nothing has moved.
_WINDOW_S = 30
_MIN_RETRY_S = 1.0
_MAX_RETRY_S = 60.0


class _Departures(NamedTuple):
    """How much had left the queue at a time."""

    time_s: float
    num_sequences: int
    num_tokens: int


class AdmissionGate:
    """Refuses new requests while too many wait. Those inside already, preempted or not, never come here again.

    A request that finds a free seat is let in, whatever its size. Otherwise it would wait, and is let in if the
    sequences that wait beyond what free seats admit at once, and their prompt tokens, stay within the limits with it.
    No seat is free while the first in the queue cannot take one for want of KV blocks.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        max_num_queued_requests: int | None,
        max_num_queued_tokens: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._max_num_requests = max_num_queued_requests
        self._max_num_tokens = max_num_queued_tokens
        self._clock = clock
        self._departures: deque[_Departures] = deque([_Departures(clock(), 0, 0)], maxlen=_WINDOW_S)

    def check(self, request: Request) -> None:
        """Raises EngineOverloadedError if `request` must not be added now."""
        if self._max_num_requests is None and self._max_num_tokens is None:
            return
        if not self._scheduler.requests:
            # How long nothing was to be done does not tell how fast the queue moves.
            self._departures.clear()
            self._departures.append(self._now())
        waiting = self._scheduler.waiting
        num_free_seats = self._scheduler.num_open_seats
        if waiting.num_sequences < num_free_seats:
            return
        queued = waiting.num_sequences - num_free_seats + num_sequences(request)
        if self._max_num_requests is not None and queued > self._max_num_requests:
            raise EngineOverloadedError(
                f"{queued} requests would wait, at most {self._max_num_requests} may (max_num_queued_requests)",
                "max_num_queued_reqs",
                self._retry_after_s(num_sequences=queued - self._max_num_requests),
            )
        queued_tokens = waiting.num_tokens - _tokens_admitted_at_once(waiting, num_free_seats) + request.num_tokens
        if self._max_num_tokens is not None and queued_tokens > self._max_num_tokens:
            raise EngineOverloadedError(
                f"{queued_tokens} prompt tokens would wait, at most {self._max_num_tokens} may (max_num_queued_tokens)",
                "max_num_queued_tokens",
                self._retry_after_s(num_tokens=queued_tokens - self._max_num_tokens),
            )

    def observe_step(self) -> None:
        """Called once per step; remembers about once a second how much has left the queue."""
        now = self._now()
        if now.time_s - self._departures[-1].time_s >= 1.0:
            self._departures.append(now)

    def _now(self) -> _Departures:
        waiting = self._scheduler.waiting
        return _Departures(self._clock(), waiting.num_left_sequences, waiting.num_left_tokens)

    def _retry_after_s(self, *, num_sequences: int = 0, num_tokens: int = 0) -> float:
        """When so much will have left the queue, if it moves as it did lately."""
        now, then = self._now(), self._departures[0]
        num_left = now.num_sequences - then.num_sequences if num_sequences else now.num_tokens - then.num_tokens
        if num_left == 0:
            return _WINDOW_S
        wanted = num_sequences or num_tokens
        return min(max(wanted * (now.time_s - then.time_s) / num_left, _MIN_RETRY_S), _MAX_RETRY_S)


def _tokens_admitted_at_once(waiting: WaitingQueue, num_free_seats: int) -> int:
    num_tokens = 0
    if num_free_seats > 0:
        for request in waiting:
            num_tokens += request.num_tokens
            num_free_seats -= num_sequences(request)
            if num_free_seats <= 0:
                break
    return num_tokens
