"""Requests that wait for admission, in the order they will be admitted."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from .config import SchedulingPolicy
from .request import Request, RequestStatus


def num_sequences(request: Request) -> int:
    """What a waiting request counts: all its continuations until they exist, then each of them for itself."""
    return request.sampling_params.n if request.index == 0 and request.num_output_tokens == 0 else 1


def num_waiting_tokens(request: Request) -> int:
    """What is to be computed for a waiting request: its sequence; nothing if another one computed its prompt."""
    return 0 if request.index > 0 and request.status is RequestStatus.WAITING else request.num_tokens


class WaitingQueue(Protocol):
    """`add` a new request; `put_back` a preempted one, which goes before everyone its policy does not put first.

    `num_sequences` and `num_tokens` are what waits now (see the functions), `num_left_*` what has ever left.
    """

    num_sequences: int
    num_tokens: int
    num_left_sequences: int
    num_left_tokens: int

    def add(self, request: Request) -> None: ...
    def put_back(self, request: Request) -> None: ...
    def peek(self) -> Request: ...
    def pop(self) -> Request: ...
    def remove(self, request: Request) -> None: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Request]: ...


class _Counted:
    """The counts of a queue whose operations report who enters and who leaves."""

    def __init__(self) -> None:
        self.num_sequences = self.num_tokens = 0
        self.num_left_sequences = self.num_left_tokens = 0

    def _enters(self, request: Request) -> None:
        self.num_sequences += num_sequences(request)
        self.num_tokens += num_waiting_tokens(request)

    def _leaves(self, request: Request) -> None:
        sequences, tokens = num_sequences(request), num_waiting_tokens(request)
        self.num_sequences -= sequences
        self.num_tokens -= tokens
        self.num_left_sequences += sequences
        self.num_left_tokens += tokens


class FCFSQueue(_Counted):
    """First come, first served. O(1) per operation."""

    def __init__(self) -> None:
        super().__init__()
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def add(self, request: Request) -> None:
        self._enters(request)
        self._requests[request.request_id] = request

    def put_back(self, request: Request) -> None:
        self._enters(request)
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        return next(iter(self._requests.values()))

    def pop(self) -> Request:
        request = self._requests.popitem(last=False)[1]
        self._leaves(request)
        return request

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]
        self._leaves(request)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())


class PriorityQueue(_Counted):
    """Lowest priority value first, then by arrival, then as added. O(log n) per operation, amortized.

    Removed requests stay in the heap, marked, until they surface or outnumber the live ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[int, float, int, Request]] = []
        self._serial = itertools.count()
        self._live: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        self._enters(request)
        self._live[request.request_id] = request
        heapq.heappush(self._heap, (request.priority, request.arrival_time_s, next(self._serial), request))

    put_back = add

    def peek(self) -> Request:
        while not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][-1]

    def pop(self) -> Request:
        request = self.peek()
        heapq.heappop(self._heap)
        del self._live[request.request_id]
        self._leaves(request)
        return request

    def remove(self, request: Request) -> None:
        del self._live[request.request_id]
        self._leaves(request)
        if len(self._heap) > 2 * len(self._live) + 16:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)

    def _is_live(self, entry: tuple[int, float, int, Request]) -> bool:
        return self._live.get(entry[-1].request_id) is entry[-1]

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Request]:
        """In order of admission; O(n log n)."""
        return (entry[-1] for entry in sorted(entry for entry in self._heap if self._is_live(entry)))


def make_waiting_queue(policy: SchedulingPolicy) -> WaitingQueue:
    return PriorityQueue() if policy == "priority" else FCFSQueue()
