"""A device that computes by itself: what is asked of it waits in one queue, and the host goes on.

Order is all the synchronization there is. Everything of a step (copies to the device, computing, copies back) is queued
on torch's current stream, one step after another, so nothing on the device needs to wait for anything else. Only memory
of the host is touched from both sides: it is the device's from `copy` until a mark set later was waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakSet

import torch


class Mark(Protocol):
    """A place in the queue."""

    def wait(self) -> None:
        """Returns when the device has done everything that was queued before. Raises what went wrong there."""
        ...


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """`replay` queues the very operations that were captured, on the very memory; `output` is what they write."""

    output: torch.Tensor
    replay: Callable[[], None]


class DeviceQueue(Protocol):
    """`device` is where its tensors live."""

    device: torch.device

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """uint8 `[num_bytes]` of the host's memory, of any content, that the device can copy from and to by itself."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy of one into the other; one of them is part of a `host_buffer`."""
        ...

    def mark(self) -> Mark: ...

    def capture(self, compute: Callable[[], torch.Tensor]) -> CapturedGraph:
        """What `compute` queues, to be queued again without it. It may be called several times, and what it reads of
        the host is read now.

        Raises whatever `compute` raises, and RuntimeError if it does what cannot be captured: wait for the device, or
        copy from or to the host.
        """
        ...


class CudaQueue:
    """The current stream of a CUDA device, which becomes this thread's. Captured graphs share one pool of memory as
    long as there are any.
    """

    def __init__(self, device: torch.device) -> None:
        # Triton launches on the thread's device, wherever the tensors are.
        if device.index is not None:
            torch.cuda.set_device(device)
        self.device = device
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return _CudaMark(event)

    def capture(self, compute: Callable[[], torch.Tensor]) -> CapturedGraph:
        # What initializes itself at its first use must have done so before, and on no stream that others wait for.
        side, current = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            compute()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=next((other.pool() for other in self._graphs), None)):
                output = compute()
        finally:
            # A capture that fails leaves its own stream behind as the current one.
            torch.cuda.set_stream(current)
        self._graphs.add(graph)
        return CapturedGraph(output, graph.replay)


@dataclass(frozen=True, slots=True)
class _CudaMark:
    event: torch.cuda.Event

    def wait(self) -> None:
        self.event.synchronize()
