"""`--help` that fits a terminal of 80 columns: flags in full, what they mean below them, one panel per subject."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text
from typer.core import TyperCommand

_MAX_WIDTH_COLUMNS = 100


class PanelledCommand(TyperCommand):
    """A command whose help groups its parameters by `rich_help_panel`. Typer's own cuts long flags in its columns."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        console = Console()
        console.width = min(console.width, _MAX_WIDTH_COLUMNS)
        console.print(Padding(Text(self.get_usage(ctx), style="bold"), (1, 1)))
        console.print(Padding(Text(self.help or ""), (0, 1, 1, 1)))
        panels: dict[str, list[Text | Padding]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            flags, meaning = record
            lines = panels.setdefault(getattr(param, "rich_help_panel", None) or "General", [])
            lines += [Text(flags, style="cyan"), Padding(Text(meaning), (0, 0, 0, 4))]
        for title, lines in panels.items():
            console.print(Panel(Group(*lines), title=title, title_align="left", border_style="dim"))
