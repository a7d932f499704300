"""A run for people: progress while it lasts, tables at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .results import Chats, DecodeRow, Load, PrefixRow, Result, Tiny
from .statistics import Spread

UNKNOWN = "–"
# Messages with numbers in them differ from request to request.
_MAX_REASONS_SHOWN = 3


class ProgressReport:
    """Draws a bar where there is a terminal; says a line per part in any case."""

    def __init__(self, console: Console, progress: Progress) -> None:
        self._console = console
        self._progress = progress
        self._task = progress.add_task("", total=None)

    def part_begins(self, name: str, num_requests: int) -> None:
        self._progress.reset(self._task, total=num_requests, description=name)

    def request_ended(self) -> None:
        self._progress.advance(self._task)

    def part_ended(self, name: str, elapsed_s: float, num_failed: int) -> None:
        failed = f", {num_failed} requests failed" if num_failed else ""
        self._console.print(Text(f"{name:<8} {elapsed_s:>7.1f} s{failed}"))


@contextmanager
def progress_report(console: Console) -> Iterator[ProgressReport]:
    """A `Watcher` that reports on `console`."""
    columns = (TextColumn("{task.description:<8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield ProgressReport(console, progress)


def print_report(result: Result, console: Console) -> None:
    """Tables of what was measured; then what failed, and what to bear in mind."""
    parts = result.parts
    if parts.prefix:
        console.print(_prefix_table(parts.prefix))
    if decodes := [*(parts.decode or ()), *([parts.streams] if parts.streams is not None else ())]:
        console.print(_decode_table(decodes))
    chats = parts.chats.load if parts.chats is not None else None
    loads = {"chats": chats, "shared": parts.shared, "unique": parts.unique}
    if measured := {name: load for name, load in loads.items() if load is not None}:
        console.print(_load_table(measured))
        for name, load in measured.items():
            console.print(Text(f"{name}: {load.description}"), style="dim")
    if parts.chats is not None:
        console.print(_turns_table(parts.chats))
    if parts.tiny is not None:
        console.print(_tiny_table(parts.tiny))
    for name, failures in result.failures.items():
        common = Counter(failures).most_common(_MAX_REASONS_SHOWN)
        for message, count in common:
            console.print(Text(f"{name}: {count} failed: {message}"), style="red")
        if rest := sum(failures.values()) - sum(count for _, count in common):
            console.print(Text(f"{name}: {rest} failed for other reasons"), style="red")
    for note in result.notes:
        console.print(Text(f"note: {note}"), style="yellow")
    if not result.complete:
        console.print("The run was not complete.", style="red")


def _prefix_table(rows: list[PrefixRow]) -> Table:
    headers = ("prompt", "cold ms", "warm ms", "warm/cold", "cached cold", "warm")
    table = _table("Prefix cache: time to first token (medians)", *headers)
    for row in rows:
        table.add_row(
            _count(row.prompt_tokens),
            _ms(row.cold_ttft_s),
            _ms(row.warm_ttft_s),
            _number(row.warm_over_cold, 3),
            _count(row.cold_cached_tokens),
            _count(row.warm_cached_tokens),
        )
    return table


def _decode_table(rows: list[DecodeRow]) -> Table:
    table = _table("Decode", "streams", "prompt", "generated", "tok/s")
    for row in rows:
        table.add_row(
            _count(row.num_streams), _count(row.prompt_tokens), _count(row.output_tokens), _number(row.tokens_per_s, 1)
        )
    return table


def _load_table(loads: dict[str, Load]) -> Table:
    headers = ("", "requests", "wall s", "req/s", "out tok/s", "cached", "TTFT ms", "p99")
    table = _table("Many requests (times: median, 99th percentile)", *headers)
    for name, load in loads.items():
        table.add_row(
            name,
            f"{load.num_requests}",
            f"{load.wall_s:.1f}",
            f"{load.requests_per_s:.2f}",
            _number(load.output_tokens_per_s, 1),
            _percent(load.cached_share),
            *_spread_cells(load.ttft)[:2],
        )
    return table


def _turns_table(chats: Chats) -> Table:
    turns = chats.ttft_median_by_turn_s
    table = _table("Chats: median TTFT by turn, ms", *(str(turn) for turn in range(1, len(turns) + 1)), "cached from 2")
    table.add_row(*map(_ms, turns), _percent(chats.cached_share_after_first_turn))
    return table


def _tiny_table(tiny: Tiny) -> Table:
    table = _table("Smallest request, ms", "", "median", "p99", "least")
    for name, times in (("plain", tiny.plain), ("stream", tiny.stream)):
        table.add_row(name, *_spread_cells(times))
    return table


def _spread_cells(times: Spread | None) -> tuple[str, str, str]:
    if times is None:
        return UNKNOWN, UNKNOWN, UNKNOWN
    return _ms(times.median_s), _ms(times.p99_s), _ms(times.min_s)


def _table(title: str, *headers: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", border_style="dim")
    for header in headers:
        table.add_column(header, justify="right" if header else "left")
    return table


def _ms(time_s: float | None) -> str:
    if time_s is None:
        return UNKNOWN
    return f"{1e3 * time_s:,.0f}" if time_s >= 0.1 else f"{1e3 * time_s:.1f}"


def _count(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.0f}"


def _number(value: float | None, digits: int) -> str:
    return UNKNOWN if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0%}"
