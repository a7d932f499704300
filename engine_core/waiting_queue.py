"""Requests that wait for admission, in the order they will be admitted."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from .config import SchedulingPolicy
from .request import Request


class WaitingQueue(Protocol):
    """`add` a new request; `put_back` a preempted one, which goes before everyone its policy does not put first."""

    def add(self, request: Request) -> None: ...
    def put_back(self, request: Request) -> None: ...
    def peek(self) -> Request: ...
    def pop(self) -> Request: ...
    def remove(self, request: Request) -> None: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Request]: ...


class FCFSQueue:
    """First come, first served. O(1) per operation."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def put_back(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        return next(iter(self._requests.values()))

    def pop(self) -> Request:
        return self._requests.popitem(last=False)[1]

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())


class PriorityQueue:
    """Lowest priority value first, then by arrival, then as added. O(log n) per operation, amortized.

    Removed requests stay in the heap, marked, until they surface or outnumber the live ones.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, int, Request]] = []
        self._serial = itertools.count()
        self._live: dict[str, Request] = {}

    def add(self, request: Request) -> None:
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
        return request

    def remove(self, request: Request) -> None:
        del self._live[request.request_id]
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
