"""How a step's numbers get to the device and back: in few copies, for which nobody waits.

The host packs arrays into memory that the device can read by itself, and queues one copy; what comes back is read when
the step has run. Two steps may be under way, so there are two such buffers, each the device's until a mark at its
step's end; the step after the next waits for that, which by then has long happened. On a CPU there is nothing to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch

from .device_queue import DeviceQueue, Mark

_FIRST_BUFFER_BYTES = 1 << 16
_STEPS_UNDER_WAY = 2
# Any type, and any width in which a kernel loads, may begin there.
_ALIGNMENT_BYTES = 64


class Download(Protocol):
    """Tensors on their way to the host."""

    def wait(self) -> Sequence[torch.Tensor]:
        """They, on the CPU, when they are there. To be looked at before the second step from theirs begins."""
        ...


class Staging(Protocol):
    """Between the host and `device`."""

    device: torch.device

    def step(self) -> AbstractContextManager[None]:
        """Encloses all a step uploads and downloads."""
        ...

    def upload(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """The arrays as tensors on the device, by one copy. They do not change any more."""
        ...

    def upload_into(self, target: torch.Tensor, array: np.ndarray) -> None:
        """Copy `array` into a tensor on the device, of the same shape and type."""
        ...

    def download(self, tensors: Sequence[torch.Tensor]) -> Download: ...


class HostStaging:
    """The device is the host: tensors are what the arrays are."""

    device = torch.device("cpu")

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def upload(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]

    def upload_into(self, target: torch.Tensor, array: np.ndarray) -> None:
        target.copy_(torch.from_numpy(array))

    def download(self, tensors: Sequence[torch.Tensor]) -> Download:
        return _Here(tensors)


class QueuedStaging:
    """By copies in the device's queue."""

    def __init__(self, queue: DeviceQueue) -> None:
        self.device = queue.device
        self._queue = queue
        self._buffers = [_Buffer(queue) for _ in range(_STEPS_UNDER_WAY)]

    @contextmanager
    def step(self) -> Iterator[None]:
        self._buffers.append(self._buffers.pop(0))
        self._buffer.begin()
        try:
            yield
        finally:
            self._buffer.mark = self._queue.mark()

    def upload(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        *starts, num_bytes = accumulate((_aligned(array.nbytes) for array in arrays), initial=0)
        staged = self._buffer.take(num_bytes)
        on_device = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        tensors = []
        for array, start in zip(arrays, starts, strict=True):
            host_array = torch.from_numpy(np.ascontiguousarray(array))
            _as(staged, start, host_array).copy_(host_array)
            tensors.append(_as(on_device, start, host_array))
        self._queue.copy(on_device, staged)
        return tensors

    def upload_into(self, target: torch.Tensor, array: np.ndarray) -> None:
        host_array = torch.from_numpy(array)
        staged = _as(self._buffer.take(array.nbytes), 0, host_array)
        staged.copy_(host_array)
        self._queue.copy(target, staged)

    def download(self, tensors: Sequence[torch.Tensor]) -> Download:
        arriving = []
        for tensor in tensors:
            here = _as(self._buffer.take(tensor.nbytes), 0, tensor)
            self._queue.copy(here, tensor)
            arriving.append(here)
        return _Arriving(arriving, self._queue.mark())

    @property
    def _buffer(self) -> _Buffer:
        return self._buffers[-1]


@dataclass(slots=True)
class _Buffer:
    """Memory for what one step uploads and downloads; it grows to what the largest step so far has needed."""

    queue: DeviceQueue
    mark: Mark | None = None
    memory: torch.Tensor = field(init=False)
    num_bytes: int = 0
    # Too small for their step, and still in use until its end.
    outgrown: list[torch.Tensor] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.memory = self.queue.host_buffer(_FIRST_BUFFER_BYTES)

    def begin(self) -> None:
        if self.mark is not None:
            self.mark.wait()
        self.num_bytes = 0
        self.outgrown.clear()

    def take(self, num_bytes: int) -> torch.Tensor:
        if self.num_bytes + num_bytes > len(self.memory):
            self.outgrown.append(self.memory)
            self.memory = self.queue.host_buffer(max(2 * len(self.memory), 1 << num_bytes.bit_length()))
            self.num_bytes = 0
        start, self.num_bytes = self.num_bytes, self.num_bytes + _aligned(num_bytes)
        return self.memory[start : start + num_bytes]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _as(memory: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """The bytes of `memory` from `start` on as a tensor of `like`'s type and shape."""
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)


@dataclass(frozen=True, slots=True)
class _Here:
    tensors: Sequence[torch.Tensor]

    def wait(self) -> Sequence[torch.Tensor]:
        return self.tensors


@dataclass(frozen=True, slots=True)
class _Arriving:
    tensors: Sequence[torch.Tensor]
    mark: Mark

    def wait(self) -> Sequence[torch.Tensor]:
        self.mark.wait()
        return self.tensors
