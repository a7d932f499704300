"""The `foreword` command and its subcommands."""

from __future__ import annotations

from typing import Annotated

import typer

from frontend.version import foreword_version

from .help import PanelledCommand
from .serve import serve

app = typer.Typer(
    name="foreword",
    help="Serve a language model over the OpenAI API, and never compute a prefix twice.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command(cls=PanelledCommand)(serve)


def main() -> None:
    """Entry point of the `foreword` command."""
    app()


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"foreword {foreword_version()}")
        raise typer.Exit


@app.callback()
def _foreword(
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass
