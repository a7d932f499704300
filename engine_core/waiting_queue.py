"""Requests that wait for admission, in the order they will be admitted."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from .config import SchedulingPolicy
from .request import Request, RequestStatus

_Place: TypeAlias = tuple[Any, ...]

# Of `PrefixQueue`: how many of the first in line it chooses from, and how often it passes over the very first.
PREFIX_CANDIDATES = 64
PREFIX_MAX_PASSES = 16


def num_sequences(request: Request) -> int:
    """What a waiting request counts: all its continuations until they exist, then each of them for itself."""
    return request.sampling_params.n if request.index == 0 and request.num_output_tokens == 0 else 1


def num_waiting_tokens(request: Request) -> int:
    """What is to be computed for a waiting request: its sequence; nothing if another one computed its prompt."""
    return 0 if request.index > 0 and request.status is RequestStatus.WAITING else request.num_tokens


class WaitingQueue:
    """A line with a place for each request, which it keeps until it leaves the queue.

    `add` a new request; `put_back` a preempted one, or a continuation of one that runs, which goes before everyone that
    `order` does not put first. A request `set_aside` still waits, but is not in line until it is brought back to its
    place. O(log n) comparisons per operation.

    Args:
        order: lowest first; equals by arrival.

    Attributes:
        num_sequences, num_tokens: what waits now, as the functions of these names count; `num_left_*`: what has ever
            left.
    """

    def __init__(self, order: Callable[[Request], _Place] = lambda request: ()) -> None:
        self.num_sequences = self.num_tokens = 0
        self.num_left_sequences = self.num_left_tokens = 0
        self._order = order
        self._line: list[tuple[_Place, Request]] = []
        self._aside: dict[str, Request] = {}
        self._places: dict[str, _Place] = {}
        self._arrivals = itertools.count()
        self._returns = itertools.count(-1, -1)

    def add(self, request: Request) -> None:
        self._enter(request, next(self._arrivals))

    def put_back(self, request: Request) -> None:
        self._enter(request, next(self._returns))

    def peek(self) -> Request | None:
        """The one that was chosen last, if it is still next, else the first in line; None if nobody is in line."""
        return self._line[0][1] if self._line else None

    def choose(self) -> Request | None:
        """Decide who is next, which `peek` and `pop` are about from then on."""
        return self.peek()

    def pop(self) -> Request:
        request = self.peek()
        assert request is not None
        self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        if self._aside.pop(request.request_id, None) is None:
            self._take(request)
        del self._places[request.request_id]
        sequences, tokens = num_sequences(request), num_waiting_tokens(request)
        self.num_sequences -= sequences
        self.num_tokens -= tokens
        self.num_left_sequences += sequences
        self.num_left_tokens += tokens

    def set_aside(self, request: Request) -> None:
        self._take(request)
        self._aside[request.request_id] = request

    def bring_back(self, request: Request) -> None:
        del self._aside[request.request_id]
        insort(self._line, (self._places[request.request_id], request))

    def place(self, request: Request) -> tuple[Any, ...]:
        """Of a request that waits, in line or aside: of two, the lower is that of who is before the other."""
        return self._places[request.request_id]

    @property
    def num_aside(self) -> int:
        return len(self._aside)

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Request]:
        """In order of admission, as far as it is known."""
        yield from self._aside.values()
        yield from (request for _, request in self._line)

    def _enter(self, request: Request, serial: int) -> None:
        place = self._places[request.request_id] = (*self._order(request), serial)
        insort(self._line, (place, request))
        self.num_sequences += num_sequences(request)
        self.num_tokens += num_waiting_tokens(request)

    def _take(self, request: Request) -> None:
        del self._line[bisect_left(self._line, (self._places[request.request_id],))]


class PrefixQueue(WaitingQueue):
    """Of the first in line, the one with the longest cached prefix goes next; equals by arrival.

    Those put back go before all, as they came. Of the others, the first in line is passed over at most `max_passes`
    times, also if it is set aside in between. So a request with k others before it is admitted at the latest by the
    (k + 1)·(max_passes + 1)-th admission, where those put back, and what is admitted while it or one before it is
    aside, are not counted.

    Args:
        num_cached_blocks: of a request; called for `num_candidates` of them per choice.
    """

    def __init__(
        self,
        num_cached_blocks: Callable[[Request], int],
        *,
        num_candidates: int = PREFIX_CANDIDATES,
        max_passes: int = PREFIX_MAX_PASSES,
    ) -> None:
        super().__init__()
        self._num_cached_blocks = num_cached_blocks
        self._num_candidates = num_candidates
        self._max_passes = max_passes
        self._chosen: Request | None = None
        self._num_passes: dict[str, int] = {}  # of those that were first in line

    def peek(self) -> Request | None:
        return super().peek() if self._chosen is None else self._chosen

    def choose(self) -> Request | None:
        self._chosen = None
        first = self.peek()
        if first is not None:
            self._chosen = first if self._goes_first(first) else self._with_longest_prefix()
        return self._chosen

    def put_back(self, request: Request) -> None:
        self._chosen = None
        super().put_back(request)

    def pop(self) -> Request:
        first = self._line[0][1]
        request = super().pop()
        if request is not first:
            self._num_passes[first.request_id] = self._num_passes.get(first.request_id, 0) + 1
        return request

    def remove(self, request: Request) -> None:
        super().remove(request)
        self._num_passes.pop(request.request_id, None)

    def _goes_first(self, first: Request) -> bool:
        was_put_back = self._places[first.request_id][-1] < 0
        return was_put_back or self._num_passes.get(first.request_id, 0) >= self._max_passes

    def _with_longest_prefix(self) -> Request:
        candidates = (request for _, request in self._line[: self._num_candidates])
        return max(candidates, key=self._num_cached_blocks)

    def _take(self, request: Request) -> None:
        if request is self._chosen:
            self._chosen = None
        super()._take(request)


def make_waiting_queue(policy: SchedulingPolicy, num_cached_blocks: Callable[[Request], int]) -> WaitingQueue:
    """`num_cached_blocks` of a request is what the policy `prefix` goes by."""
    match policy:
        case "fcfs":
            return WaitingQueue()
        case "priority":
            return WaitingQueue(lambda request: (request.priority, request.arrival_time_s))
        case "prefix":
            return PrefixQueue(num_cached_blocks)
