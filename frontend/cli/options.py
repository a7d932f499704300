"""What the commands' options have in common, and how a command ends when the person asked for something impossible."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import typer

from frontend.sizes import parse_size

USER_ERROR_EXIT_CODE = 2
# What timers, JSON and addresses have words for.
A_DAY_S = 86_400.0
MOST_BYTES = 1 << 60

R = TypeVar("R")


def option(panel: str, help_text: str, *names: str, **settings: Any) -> Any:
    """An option that `--help` shows in `panel`."""
    return typer.Option(*names, rich_help_panel=panel, help=help_text, **settings)


def takes_settings(declaration: Callable[..., None], argument: str) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """A decorator: adds the options in `declaration`'s signature to a command, which gets their values, by name in a
    dict, as its keyword argument `argument`.
    """
    options = inspect.signature(declaration, eval_str=True).parameters

    def decorate(command: Callable[..., R]) -> Callable[..., R]:
        own = inspect.signature(command, eval_str=True).parameters.values()

        @functools.wraps(command)
        def with_settings(**given: Any) -> R:
            settings = {name: given.pop(name) for name in options}
            return command(**given, **{argument: settings})

        all_of_them = (*(parameter for parameter in own if parameter.name != argument), *options.values())
        parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in all_of_them]
        # What typer reads.
        with_settings.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_settings.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return with_settings

    return decorate


def size(text: str | int) -> int:
    """Parser of options that are sizes in bytes. With none of any of them there is nothing to serve."""
    try:
        num_bytes = parse_size(str(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if not 1 <= num_bytes <= MOST_BYTES:
        raise typer.BadParameter(f"{text!r} is out of range; 1 byte to {MOST_BYTES >> 40} TiB can be")
    return num_bytes


def counts(text: str | tuple[int, ...]) -> tuple[int, ...]:
    """Parser of options that are several numbers from 1 up."""
    try:
        numbers = tuple(int(part) for part in text.split(",")) if isinstance(text, str) else text
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a list of numbers like 1,2,4") from error
    if min(numbers) < 1:
        raise typer.BadParameter(f"{min(numbers)} is not at least 1")
    return numbers


def fail(message: str) -> NoReturn:
    """Say what is wrong on one line and exit with `USER_ERROR_EXIT_CODE`."""
    typer.echo(f"foreword: {message}", err=True)
    raise typer.Exit(USER_ERROR_EXIT_CODE)
