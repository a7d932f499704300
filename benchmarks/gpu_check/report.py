"""What came of it: a row of a Markdown table for each case, and the same as JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import torch
import triton

from benchmarks.gpu_check.timing import Roofline

_COLUMNS = (
    ("kernel", 18),
    ("case", 44),
    ("checked", 12),
    ("µs", 9),
    ("rate", 14),
    ("roofline", 8),
    ("÷ torch", 7),
    ("goal", 14),
)

Outcome = Literal["ok", "wrong", "failed", "left out"]


@dataclass(frozen=True, slots=True)
class Result:
    """Of one case. `error` is 1 where it is as large as it may be; a None was not measured."""

    kernel: str
    case: str
    outcome: Outcome
    error: float | None = None
    reason: str | None = None
    seconds: float | None = None
    beside_seconds: float | None = None
    bytes_per_s: float | None = None
    flops_per_s: float | None = None
    roofline_share: float | None = None
    goal: str | None = None
    is_goal_reached: bool | None = None

    @property
    def time_ratio(self) -> float | None:
        """Our time ÷ torch's, or that of what else it is beside."""
        if self.seconds is None or self.beside_seconds is None:
            return None
        return self.seconds / self.beside_seconds


def table_head() -> str:
    """Two lines."""
    titles = " | ".join(title.ljust(width) for title, width in _COLUMNS)
    rules = " | ".join("-" * width for _, width in _COLUMNS)
    return f"| {titles} |\n| {rules} |"


def table_row(result: Result) -> str:
    checked: str = result.outcome if result.error is None else f"{result.outcome} ({result.error:.2f})"
    goal = ""
    if result.goal is not None:
        reached = {True: ", reached", False: ", NOT", None: ""}[result.is_goal_reached]
        goal = f"{result.goal}{reached}"
    cells = (
        result.kernel,
        result.case,
        checked,
        "" if result.seconds is None else f"{result.seconds * 1e6:,.1f}",
        _rate(result),
        "" if result.roofline_share is None else f"{result.roofline_share:.0%}",
        "" if result.time_ratio is None else f"{result.time_ratio:.2f}",
        goal,
    )
    return f"| {' | '.join(cell.ljust(width) for cell, (_, width) in zip(cells, _COLUMNS, strict=True))} |"


def _rate(result: Result) -> str:
    if result.flops_per_s is not None:
        return f"{result.flops_per_s / 1e12:,.1f} TFLOP/s"
    return "" if result.bytes_per_s is None else f"{result.bytes_per_s / 1e9:,.0f} GB/s"


def describe_machine() -> dict[str, object]:
    """When, on what card and with which versions."""
    about: dict[str, object] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        about |= {
            "card": card.name,
            "capability": f"{card.major}.{card.minor}",
            "multiprocessors": card.multi_processor_count,
            "memory_bytes": card.total_memory,
            "cuda": torch.version.cuda,
        }
    return about


def save_json(path: Path, roofline: Roofline | None, results: Sequence[Result], wall_s: float) -> None:
    """Overwrites what is there."""
    content = {
        **describe_machine(),
        "wall_s": round(wall_s, 1),
        "roofline": None if roofline is None else asdict(roofline),
        "results": [asdict(result) | {"time_ratio": result.time_ratio} for result in results],
    }
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
