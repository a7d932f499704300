"""What the commands' options have in common, and how a command ends when the person asked for something impossible."""

from __future__ import annotations

from typing import Any, NoReturn

import typer

from frontend.sizes import parse_size

USER_ERROR_EXIT_CODE = 2


def option(panel: str, help_text: str, *names: str, **settings: Any) -> Any:
    """An option that `--help` shows in `panel`."""
    return typer.Option(*names, rich_help_panel=panel, help=help_text, **settings)


def size(text: str | int) -> int:
    """Parser of options that are sizes in bytes."""
    try:
        return parse_size(str(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def fail(message: str) -> NoReturn:
    """Say what is wrong on one line and exit with `USER_ERROR_EXIT_CODE`."""
    typer.echo(f"foreword: {message}", err=True)
    raise typer.Exit(USER_ERROR_EXIT_CODE)
