"""What is checked and timed: plain data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kernels.dispatch import computed_by

# One unit in the last place of a result that was rounded, or truncated as Triton's interpreter does with bfloat16.
_UNIT = {torch.float64: 2.0**-50, torch.float32: 2.0**-22, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


@dataclass(frozen=True, slots=True)
class Setting:
    """Where cases make their tensors: on a GPU, or in a rehearsal, where everything has to be tiny."""

    device: torch.device
    is_rehearsal: bool = False

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Those to check, the usual one first."""
        return (torch.bfloat16,) if self.is_rehearsal else (torch.bfloat16, torch.float16, torch.float32)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
        """Normal values, other ones each time."""
        return torch.randn(shape, device=self.device, dtype=dtype).mul_(scale)

    def poisoned(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """NaN everywhere: what must not be read shows."""
        return torch.full(shape, math.nan, dtype=dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class Goal:
    """What is to be reached: at least this share of the roofline, or at most so much of the time of `Work.beside`."""

    min_roofline_share: float | None = None
    max_time_ratio: float | None = None

    def __str__(self) -> str:
        if self.min_roofline_share is not None:
            return f"≥ {self.min_roofline_share:.0%}"
        return f"≤ {self.max_time_ratio:.2f}×"


@dataclass(frozen=True, slots=True)
class Work:
    """A case with its tensors made.

    Args:
        check: computes, and says how far from right the result is: 1 is as far as it may be.
        run: what is timed; None is nothing.
        beside: what takes as long where our kernel is not used.
        moved_bytes: what has to be read and written at least.
        flops: multiplications and additions, each counted, at least.
    """

    check: Callable[[], float]
    run: Callable[[], object] | None = None
    beside: Callable[[], object] | None = None
    moved_bytes: float = 0.0
    flops: float = 0.0
    goal: Goal | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """`prepare` makes the tensors, which live no longer than the case."""

    name: str
    prepare: Callable[[], Work]


def apart(actual: torch.Tensor, expected: torch.Tensor, units: float = 4.0) -> float:
    """How far apart: 1 is `units` units in the last place of `actual`'s type, relative to the larger of a value and 1.

    Infinite where only one of the two is NaN or they are of different shapes.
    """
    if actual.shape != expected.shape:
        return math.inf
    if not actual.numel():
        return 0.0
    if not actual.dtype.is_floating_point:
        return 0.0 if torch.equal(actual, expected) else math.inf
    wide, exact = actual.double(), expected.double()
    error = (wide - exact).abs() / exact.abs().clamp(min=1.0)
    both = torch.isnan(wide) & torch.isnan(exact)
    error = error.masked_fill(both | (wide == exact), 0.0).nan_to_num(nan=math.inf, posinf=math.inf)
    return error.max().item() / (units * _UNIT[actual.dtype])


def from_torch(compute: Callable[[], Sequence[torch.Tensor]], units: float = 4.0) -> float:
    """How far what Triton computes is `apart` from what torch does. `compute` makes new tensors each time."""
    actual = compute()
    with computed_by("torch"):
        expected = compute()
    return max(apart(*pair, units) for pair in zip(actual, expected, strict=True))


def in_torch(run: Callable[[], object]) -> Callable[[], object]:
    """The same by the reference."""

    def reference() -> object:
        with computed_by("torch"):
            return run()

    return reference


def tensor_bytes(*tensors: torch.Tensor) -> int:
    """Of all of them together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
