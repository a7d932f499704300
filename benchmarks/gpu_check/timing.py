"""How long something takes on the GPU, and what the GPU can do at best."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

# Reading it takes a GPU longer than Python needs for a launch, and evicts everything from its caches.
_FLUSHED_BYTES = 1 << 30
_MIN_REPETITIONS, _MAX_REPETITIONS = 5, 40
_WANTED_S = 0.2


@dataclass(frozen=True, slots=True)
class Roofline:
    """What was measured on this card: a large copy, read and written bytes together, and a large bfloat16 product."""

    bytes_per_s: float
    flops_per_s: float

    def seconds(self, moved_bytes: float, flops: float) -> float:
        """How long it takes at least, memory and arithmetic at once."""
        return max(moved_bytes / self.bytes_per_s, flops / self.flops_per_s)


class Stopwatch:
    """Times functions that enqueue work on the current stream, with cold caches.

    The flush before each run keeps the GPU busy until Python has enqueued what is timed, so launches take no part.
    """

    def __init__(self) -> None:
        self._flushed = torch.zeros(_FLUSHED_BYTES // 4, dtype=torch.float32, device="cuda")

    def seconds(self, run: Callable[[], object]) -> float:
        """The median of several runs, after one that compiles what is not compiled and one to see how many."""
        run()
        estimate = self._once(run)
        repetitions = min(_MAX_REPETITIONS, max(_MIN_REPETITIONS, int(_WANTED_S / estimate)))
        return statistics.median(self._once(run) for _ in range(repetitions))

    def _once(self, run: Callable[[], object]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flushed.sum()
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def measure_roofline(stopwatch: Stopwatch) -> Roofline:
    """Of the card as it is now: warm, cooled as it is, at the clocks it is allowed."""
    return Roofline(_copied_bytes_per_s(stopwatch), _multiplied_flops_per_s(stopwatch))


def _copied_bytes_per_s(stopwatch: Stopwatch) -> float:
    source, target = (torch.zeros(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * source.numel() / stopwatch.seconds(lambda: target.copy_(source))


def _multiplied_flops_per_s(stopwatch: Stopwatch) -> float:
    size = 8192
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * size**3 / stopwatch.seconds(lambda: a @ b)
