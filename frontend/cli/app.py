"""The `foreword` command and its subcommands."""

from __future__ import annotations

from typing import Annotated

import typer

from frontend.version import foreword_version

from . import bench, chat, engine, keys, serve
from .help import PanelledCommand, PanelledGroup

EXAMPLES = """
foreword serve                    serve a small built-in model that sees
foreword chat --image shapes.png  ask it about a picture, in another terminal
foreword serve smollm2            serve the built-in one that talks
foreword bench --quick            measure what is served
foreword engine --help            run an engine alone, for frontends elsewhere
foreword serve --help             all settings of a command
"""

app = typer.Typer(
    name="foreword",
    cls=PanelledGroup,
    help="Serve a language model over the OpenAI API, and never compute a prefix twice.",
    epilog=EXAMPLES,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command(cls=PanelledCommand, epilog=serve.EXAMPLES)(serve.serve)
app.command(cls=PanelledCommand, epilog=chat.EXAMPLES)(chat.chat)
app.command(cls=PanelledCommand, epilog=bench.EXAMPLES)(bench.bench)
app.command(cls=PanelledCommand, epilog=engine.EXAMPLES)(engine.engine)
app.command(cls=PanelledCommand, epilog=keys.EXAMPLES)(keys.keys)


def main() -> None:
    """Entry point of the `foreword` command."""
    # However it was started; the shell's completion is tied to the name.
    app(prog_name="foreword")


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
