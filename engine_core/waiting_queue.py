"""Requests that wait for admission, in the order they will be admitted."""

from __future__ import annotations

import heapq
import itertools
from abc import ABC, abstractmethod
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

    A request `set_aside` still waits, but is not in line until it is brought back, like a preempted one. `peek` and
    `pop` are about the first in line, `peek` None without one. `num_sequences` and `num_tokens` are what waits now (see
    the functions), `num_left_*` what has ever left.
    """

    num_sequences: int
    num_tokens: int
    num_left_sequences: int
    num_left_tokens: int

    def add(self, request: Request) -> None: ...
    def put_back(self, request: Request) -> None: ...
    def peek(self) -> Request | None: ...
    def pop(self) -> Request: ...
    def remove(self, request: Request) -> None: ...
    def set_aside(self, request: Request) -> None: ...
    def bring_back(self, request: Request) -> None: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Request]: ...


class _Waiting(ABC):
    """What queues of any order have in common: they count who enters and leaves, and know who is aside.

    The order itself is in `_push`, `_push_front`, `peek`, `_take`, `_num_in_line` and `_in_line`.
    """

    def __init__(self) -> None:
        self.num_sequences = self.num_tokens = 0
        self.num_left_sequences = self.num_left_tokens = 0
        self._aside: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        self._enters(request)
        self._push(request)

    def put_back(self, request: Request) -> None:
        self._enters(request)
        self._push_front(request)

    def pop(self) -> Request:
        request = self.peek()
        assert request is not None
        self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        if self._aside.pop(request.request_id, None) is None:
            self._take(request)
        self._leaves(request)

    def set_aside(self, request: Request) -> None:
        self._take(request)
        self._aside[request.request_id] = request

    def bring_back(self, request: Request) -> None:
        del self._aside[request.request_id]
        self._push_front(request)

    def __len__(self) -> int:
        return self._num_in_line() + len(self._aside)

    def __iter__(self) -> Iterator[Request]:
        """In order of admission, as far as it is known."""
        yield from self._aside.values()
        yield from self._in_line()

    @abstractmethod
    def _push(self, request: Request) -> None: ...

    @abstractmethod
    def _push_front(self, request: Request) -> None: ...

    @abstractmethod
    def peek(self) -> Request | None: ...

    @abstractmethod
    def _take(self, request: Request) -> None: ...

    @abstractmethod
    def _num_in_line(self) -> int: ...

    @abstractmethod
    def _in_line(self) -> Iterator[Request]: ...

    def _enters(self, request: Request) -> None:
        self.num_sequences += num_sequences(request)
        self.num_tokens += num_waiting_tokens(request)

    def _leaves(self, request: Request) -> None:
        sequences, tokens = num_sequences(request), num_waiting_tokens(request)
        self.num_sequences -= sequences
        self.num_tokens -= tokens
        self.num_left_sequences += sequences
        self.num_left_tokens += tokens


class FCFSQueue(_Waiting):
    """First come, first served. O(1) per operation."""

    def __init__(self) -> None:
        super().__init__()
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def _push(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def _push_front(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request | None:
        return next(iter(self._requests.values()), None)

    def _take(self, request: Request) -> None:
        del self._requests[request.request_id]

    def _num_in_line(self) -> int:
        return len(self._requests)

    def _in_line(self) -> Iterator[Request]:
        return iter(self._requests.values())


class PriorityQueue(_Waiting):
    """Lowest priority value first, then by arrival, then as added. O(log n) per operation, amortized.

    Removed requests stay in the heap, marked, until they surface or outnumber the live ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[int, float, int, Request]] = []
        self._serial = itertools.count()
        self._live: dict[str, int] = {}  # the serial of the heap's entry

    def _push(self, request: Request) -> None:
        serial = self._live[request.request_id] = next(self._serial)
        heapq.heappush(self._heap, (request.priority, request.arrival_time_s, serial, request))

    _push_front = _push

    def peek(self) -> Request | None:
        while self._heap and not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][-1] if self._heap else None

    def _take(self, request: Request) -> None:
        del self._live[request.request_id]
        if len(self._heap) > 2 * len(self._live) + 16:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)

    def _is_live(self, entry: tuple[int, float, int, Request]) -> bool:
        return self._live.get(entry[-1].request_id) == entry[2]

    def _num_in_line(self) -> int:
        return len(self._live)

    def _in_line(self) -> Iterator[Request]:
        """O(n log n)."""
        return (entry[-1] for entry in sorted(entry for entry in self._heap if self._is_live(entry)))


def make_waiting_queue(policy: SchedulingPolicy) -> WaitingQueue:
    return PriorityQueue() if policy == "priority" else FCFSQueue()
