"""The options of the commands that talk to a server, and what is said when there is none."""

from __future__ import annotations

from typing import Annotated, NoReturn

import typer

from frontend.api_key import API_KEY_ENV

from .options import fail, option

DEFAULT_URL = "http://127.0.0.1:8000"
_SERVER = "Server"


def _one_key(context: typer.Context, option: typer.CallbackParam, value: str | None) -> str | None:
    # Where a server takes its keys from, there may be several.
    source = context.get_parameter_source(option.name or "")
    is_from_environment = source is not None and source.name == "ENVIRONMENT"
    return value.partition(",")[0].strip() if value and is_from_environment else value


Url = Annotated[str, option(_SERVER, "The server, with or without /v1 at its end.", metavar="URL")]
Model = Annotated[str | None, option(_SERVER, "Model to ask. Default: the first the server lists.", metavar="NAME")]
ApiKey = Annotated[
    str | None,
    option(
        _SERVER,
        f"Key the server asks for. Better in {API_KEY_ENV}, since others can see a command's arguments.",
        envvar=API_KEY_ENV,
        callback=_one_key,
        show_envvar=False,
        metavar="KEY",
    ),
]


def fail_without_server(url: str, message: str) -> NoReturn:
    """End the command: nobody answers at `url`."""
    fail(f"{message}\nStart a server with: foreword serve" if url == DEFAULT_URL else message)
