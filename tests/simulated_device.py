"""A device with a queue of its own, on the CPU, which forgives nothing that a GPU would not.

What is queued happens in order, but no host sees it before it has waited: copies to the host arrive when a mark behind
them is waited for, and hold garbage until then; memory that is still to be read by the device must not have changed by
that time. A captured graph does again exactly what was done, with the numbers the host had then, on the tensors of
then; what cannot be captured is refused. Triton's kernels run in its interpreter, captured as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from engine_core.model.device_queue import CapturedGraph

_GARBAGE = 0xA5
# The host would have to wait for what they tell it. `lift_fresh` makes tensors of the host's numbers; one of them is
# fine.
_HOST_READS = ("item", "_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")


class RaceError(AssertionError):
    """The host touched memory that was the device's."""


class CaptureError(RuntimeError):
    """As torch's, for what a graph cannot hold."""


@dataclass
class SimulatedQueue:
    """As `DeviceQueue`. Counted are the copies asked for and those that certainly were done, and replays of graphs."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    num_copies: int = 0
    num_replays: int = 0
    num_done: int = 0
    _buffers: list[torch.Tensor] = field(default_factory=list)
    # By when they were queued: until a mark behind them is waited for, the device may not have done them.
    _pending: list[Callable[[], None]] = field(default_factory=list)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        buffer = torch.full((num_bytes,), _GARBAGE, dtype=torch.uint8)
        self._buffers.append(buffer)
        return buffer

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.shape == source.shape and target.dtype == source.dtype
        self.num_copies += 1
        assert self._is_host(target) != self._is_host(source), "a copy is between a host buffer and the device"
        as_queued = source.clone()
        if self._is_host(target):
            target.view(-1).view(torch.uint8).fill_(_GARBAGE)

            def arrive() -> None:
                target.copy_(as_queued)

            self._pending.append(arrive)
            return
        target.copy_(source)

        def check() -> None:
            if not torch.equal(_bytes(source), _bytes(as_queued)):
                raise RaceError("a host buffer was written before the device had read it")

        self._pending.append(check)

    def _is_host(self, tensor: torch.Tensor) -> bool:
        return any(_storage(buffer) == _storage(tensor) for buffer in self._buffers)

    def mark(self) -> SimulatedMark:
        return SimulatedMark(self, self.num_done + len(self._pending))

    @torch.inference_mode()
    def catch_up(self, place: int) -> None:
        while self.num_done < place:
            self.num_done += 1
            self._pending.pop(0)()

    def capture(self, compute: Callable[[], torch.Tensor]) -> CapturedGraph:
        compute()
        with torch.inference_mode(), _Recorder() as recorder, _interpreted_launches(recorder):
            output = compute()

        @torch.inference_mode()
        def replay() -> None:
            self.num_replays += 1
            for operation in recorder.operations:
                operation()

        return CapturedGraph(output, replay)


@dataclass(frozen=True)
class SimulatedMark:
    queue: SimulatedQueue
    place: int

    def wait(self) -> None:
        self.queue.catch_up(self.place)


class _Recorder(TorchDispatchMode):
    """Keeps every operation that writes memory, with the tensors and numbers it had."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Callable[[], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        result = func(*args, **kwargs)
        outputs = [value for value in tree_flatten(result)[0] if isinstance(value, torch.Tensor)]
        if name in _HOST_READS or (name == "lift_fresh" and outputs[0].numel() > 1):
            raise CaptureError(f"{name} cannot be captured")
        inputs = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
        storages = {_storage(value) for value in inputs}
        if func._schema.is_mutable:
            self.operations.append(lambda: func(*args, **kwargs))
        elif any(_storage(output) not in storages for output in outputs):
            self.operations.append(lambda: _write(outputs, func(*args, **kwargs)))
        return result


def _write(outputs: list[torch.Tensor], result: Any) -> None:
    values = [value for value in tree_flatten(result)[0] if isinstance(value, torch.Tensor)]
    for output, value in zip(outputs, values, strict=True):
        output.copy_(value)


@contextmanager
def _interpreted_launches(recorder: _Recorder) -> Iterator[None]:
    """Within it, launches of interpreted kernels are recorded whole, and not what the interpreter does for them."""
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def record(executor: Any, *args: Any, **kwargs: Any) -> None:
        def again() -> None:
            launch(executor, *args, **kwargs)

        with torch.utils._python_dispatch._disable_current_modes():
            again()
        recorder.operations.append(again)

    with patch.object(GridExecutor, "__call__", record):
        yield


def _storage(tensor: torch.Tensor) -> int:
    # Packed weights have none that can be seen.
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
