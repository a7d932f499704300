"""`--help` that fits a terminal of 80 columns: flags in full, what they mean below them, one panel per subject."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Console, Group
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from .lora_options import flag_repeated

_MAX_WIDTH_COLUMNS = 100
_INDENT_COLUMNS = 4

_PLACEHOLDERS = {
    "int": "N",
    "int range": "N",
    "float": "X",
    "float range": "X",
    "str": "TEXT",
    "list[str]": "TEXT",
    "path": "PATH",
    "list[Path]": "PATH",
}


class PanelledCommand(TyperCommand):
    """A command whose help groups its parameters by `rich_help_panel`. Typer's own cuts long flags in its columns.

    The epilog is the command's examples, one a line.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _print_help(self, ctx, panels=[])

    def parse_args(self, ctx: Any, args: Sequence[str]) -> list[str]:
        try:
            # No option of its library's takes several values.
            return super().parse_args(ctx, [*flag_repeated(args)])
        except typer.BadParameter as error:
            # Its library's own word before what is wrong.
            error.message = error.message.removeprefix("Value error, ")
            raise


class PanelledGroup(TyperGroup):
    """The same for a command of commands."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        commands = Table.grid(padding=(0, 2))
        for name, command in self.commands.items():
            commands.add_row(Text(name, style="cyan"), Text(_first_paragraph(command.help or "")))
        _print_help(self, ctx, panels=[_panel("Commands", commands)])


def _print_help(command: Any, ctx: Any, *, panels: list[Panel]) -> None:
    console = Console(highlight=False)
    console.width = min(console.width, _MAX_WIDTH_COLUMNS)
    console.print(Padding(Text(command.get_usage(ctx), style="bold"), (1, 1)))
    for paragraph in (command.help or "").split("\n\n"):
        console.print(Padding(Text(" ".join(paragraph.split())), (0, 1, 1, 1)))
    for panel in panels:
        console.print(panel)
    for title, lines in _parameters(command, ctx).items():
        console.print(_panel(title, Group(*lines)))
    if command.epilog:
        console.print(_panel("Examples", Text(command.epilog.strip())))


def _parameters(command: Any, ctx: Any) -> dict[str, list[Text | Padding]]:
    panels: dict[str, list[Text | Padding]] = {}
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx)
        if record is None:
            continue
        flags, meaning = record
        lines = panels.setdefault(getattr(param, "rich_help_panel", None) or "General", [])
        lines.append(Text(_readable_flags(flags), style="cyan"))
        switch = "on" if param.default else "off"
        meaning = _readable_meaning(meaning, default=switch if param.secondary_opts else None)
        lines.append(Padding(Text(meaning), (0, 0, 0, _INDENT_COLUMNS)))
    return panels


def _readable_flags(flags: str) -> str:
    """`--port <int range>` → `--port N`, `--dtype <auto|float32>` → `--dtype auto|float32`."""
    return re.sub(r"\s*<([^>]*)>", lambda match: f" {_PLACEHOLDERS.get(match[1], match[1])}", flags).removesuffix(
        " bool"
    )


def _readable_meaning(meaning: str, *, default: str | None) -> str:
    """`[default: 8; 0<=x<=9]` → `[default: 8; 0 to 9]`. `default` is said instead of what typer says."""
    meaning = re.sub(r"([\d.]+)<=x<=([\d.]+)", r"\1 to \2", meaning)
    meaning = re.sub(r"x>=([\d.-]+)", r"at least \1", meaning)
    return re.sub(r"\[default: [a-z-]+\]", f"[default: {default}]", meaning) if default else meaning


def _panel(title: str, content: Any) -> Panel:
    return Panel(content, title=title, title_align="left", border_style="dim")


def _first_paragraph(text: str) -> str:
    return " ".join(text.split("\n\n", maxsplit=1)[0].split())
