"""The options of the commands that talk to a server, and what is said when there is none."""

from __future__ import annotations

from typing import Annotated, NoReturn

from .options import fail, option

DEFAULT_URL = "http://127.0.0.1:8000"
API_KEY_VARIABLE = "FOREWORD_API_KEY"
_SERVER = "Server"

Url = Annotated[str, option(_SERVER, "The server, with or without /v1 at its end.", metavar="URL")]
Model = Annotated[str | None, option(_SERVER, "Model to ask. Default: the first the server lists.", metavar="NAME")]
ApiKey = Annotated[
    str | None,
    option(
        _SERVER,
        f"Key the server asks for. Better in {API_KEY_VARIABLE}, since others can see a command's arguments.",
        envvar=API_KEY_VARIABLE,
        show_envvar=False,
        metavar="KEY",
    ),
]


def fail_without_server(url: str, message: str) -> NoReturn:
    """End the command: nobody answers at `url`."""
    fail(f"{message}\nStart a server with: foreword serve" if url == DEFAULT_URL else message)
