"""What was measured of several servers as one table, with the goals that Foreword has beside its peers."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from frontend.bench.results import Load, Result

Rows = dict[str, float | None]

START, MEMORY = "start to first answer, s", "memory after the run, MiB"


@dataclass(frozen=True, slots=True)
class Goal:
    """`bound` is of the ratio to the server whose name has `peer` in it; to the better peer if that is None; of the
    figure itself if it is "".
    """

    bound: float
    peer: str | None


# By how a row's name begins. More is better of tokens/s, less of all else.
GOALS = {
    "TTFT cold": Goal(0.9, "vllm"),
    "TTFT warm": Goal(0.5, None),
    "decode at 32,": Goal(1.2, "llama"),
    "decode at 2,048,": Goal(1.5, "llama"),
    "8 streams": Goal(2.0, "vllm"),
    "chats, wall": Goal(0.6, "vllm"),
    "shared prompt, wall": Goal(0.6, "vllm"),
    "unique prompts, output": Goal(1.5, "vllm"),
    "tiny request": Goal(0.7, None),
    START: Goal(15.0, ""),
    MEMORY: Goal(0.5, "vllm"),
}


def rows(result: Result) -> Rows:
    """The figures of one run by their names in the table; times in ms."""
    parts = result.parts
    table: Rows = {}
    for prefix in parts.prefix or ():
        size = f"{prefix.target_tokens:,} tokens"
        table[f"TTFT cold, {size}, ms"] = _ms(prefix.cold_ttft_s)
        table[f"TTFT warm, {size}, ms"] = _ms(prefix.warm_ttft_s)
    for decode in parts.decode or ():
        table[f"decode at {decode.target_context_tokens:,}, tokens/s"] = decode.tokens_per_s
    if (streams := parts.streams) is not None:
        name = f"{streams.num_streams} streams at {streams.target_context_tokens:,}, tokens/s"
        table[name] = streams.tokens_per_s
    loads: list[tuple[str, Load | None]] = [
        ("chats", parts.chats and parts.chats.load),
        ("shared prompt", parts.shared),
        ("unique prompts", parts.unique),
    ]
    for name, load in loads:
        if load is not None:
            table[f"{name}, wall s"] = load.wall_s
            table[f"{name}, output tokens/s"] = load.output_tokens_per_s
            table[f"{name}, TTFT median, ms"] = load.ttft and _ms(load.ttft.median_s)
    if parts.tiny is not None:
        table["tiny request, ms"] = parts.tiny.plain and _ms(parts.tiny.plain.median_s)
        table["tiny request streamed, ms"] = parts.tiny.stream and _ms(parts.tiny.stream.median_s)
    return table


def table(measured: dict[str, Sequence[Rows]]) -> list[str]:
    """Markdown: medians over each server's runs; the first server beside the others, and whether a goal is met.

    Where a goal names a peer the ratio is to that one, else to the better of the others.
    """
    lines = [
        "| " + " | ".join(["", *measured, "ratio", "goal", "met"]) + " |",
        "| --- |" + " --- |" * (len(measured) + 3),
    ]
    runs = next(iter(measured.values()))
    for name in dict.fromkeys(name for run in runs for name in run):
        values = {server: _median(run.get(name) for run in runs) for server, runs in measured.items()}
        cells = [name, *(_shown(value) for value in values.values()), *_compared(name, values)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _compared(name: str, values: dict[str, float | None]) -> tuple[str, str, str]:
    """Ratio, goal, and whether it is met."""
    first, *others = values
    ours = values[first]
    goal = next((goal for beginning, goal in GOALS.items() if name.startswith(beginning)), None)
    more_is_better = "tokens/s" in name
    sign = "≥" if more_is_better else "≤"

    def met(value: float, bound: float) -> str:
        return "yes" if (value >= bound if more_is_better else value <= bound) else "**no**"

    if goal is not None and goal.peer == "":
        return "", f"{sign} {goal.bound:g}", "" if ours is None else met(ours, goal.bound)
    known = {server: value for server in others if (value := values[server])}
    better = (max if more_is_better else min)(known, key=lambda server: known[server], default=None)
    if ours is None or better is None:
        return "", "", ""
    named = next((server for server in known if goal and goal.peer and goal.peer in server.lower()), None)
    ratio = ours / known[named or better]
    ratio_cell = f"{ratio:.2f} × {named or better}"
    # A goal beside a peer that is not here says nothing about the others.
    if goal is None or (goal.peer and named is None):
        return ratio_cell, "", ""
    return ratio_cell, f"{sign} {goal.bound:g}", met(ratio, goal.bound)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
