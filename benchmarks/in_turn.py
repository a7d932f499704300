"""Several things measured in one process, in turn, round after round: a machine is now quick and now slow."""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from engine_core import EngineCore

Measured = TypeVar("Measured")


@dataclass(frozen=True, slots=True)
class Case(Generic[Measured]):
    """`times_s` measures it on one of them; the number is that of the round."""

    name: str
    times_s: Callable[[Measured, int], list[float]]


def numbers(text: str) -> list[int]:
    """`1,8` as options have it."""
    return [int(number) for number in text.split(",")]


def step_s(engine: EngineCore) -> float:
    started_s = time.perf_counter()
    engine.step()
    return time.perf_counter() - started_s


def measure(measured: dict[str, Measured], cases: Sequence[Case[Measured]], rounds: int) -> dict[str, dict[str, float]]:
    """Median seconds by case and by what was measured."""
    times_s: dict[str, dict[str, list[float]]] = {case.name: defaultdict(list) for case in cases}
    names = list(measured)
    for number in range(-1, rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
        for place, case in enumerate(cases):
            first = (number + place) % len(names)
            # Nobody always follows the same one, whose weights it finds in the caches.
            for name in names[first:] + names[:first]:
                taken_s = case.times_s(measured[name], number)
                # The first round fills caches.
                if number >= 0:
                    times_s[case.name][name] += taken_s
    return {case: {name: statistics.median(by_name[name]) for name in names} for case, by_name in times_s.items()}


def table(medians: dict[str, dict[str, float]]) -> list[str]:
    """Markdown, in ms. By how much more than the first is beside the others."""
    names = list(next(iter(medians.values())))
    lines = [f"| ms | {' | '.join(f'`{name}`' for name in names)} |", "| --- |" + " --- |" * len(names)]
    for case, medians_s in medians.items():
        first_s = medians_s[names[0]]
        cells = [f"{first_s * 1e3:.1f}"]
        cells += [f"{medians_s[name] * 1e3:.1f} ({medians_s[name] / first_s - 1:+.0%})" for name in names[1:]]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return lines
