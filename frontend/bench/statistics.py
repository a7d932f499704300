"""Numbers about many numbers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TypeVar

import msgspec

N = TypeVar("N", int, float)


class Spread(msgspec.Struct, frozen=True):
    """Times in seconds."""

    mean_s: float
    median_s: float
    p99_s: float
    min_s: float


def spread(times_s: Sequence[float]) -> Spread | None:
    """None of no times."""
    if not times_s:
        return None
    return Spread(statistics.fmean(times_s), statistics.median(times_s), percentile(times_s, 99), min(times_s))


def percentile(values: Sequence[float], percent: float) -> float:
    """Between the two nearest values by distance. Raises ValueError: no values, or `percent` not in [0, 100]."""
    if not values or not 0 <= percent <= 100:
        raise ValueError(f"no percentile {percent} of {len(values)} values")
    ordered = sorted(values)
    below, part = divmod((len(ordered) - 1) * percent / 100, 1)
    low = ordered[int(below)]
    return low + part * (ordered[min(int(below) + 1, len(ordered) - 1)] - low)


def median(values: Sequence[float | None]) -> float | None:
    """Of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def total(values: Sequence[N | None]) -> N | None:
    """Of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """None where it cannot be known."""
    return numerator / denominator if numerator is not None and denominator else None
