"""`foreword keys DIR`: the keys with which engines and frontends talk over TCP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ipc.key_files import KeyFileError, write_key_set

from .options import fail, option

EXAMPLES = """
foreword keys keys
foreword keys /etc/foreword/keys --force
"""


def keys(
    directory: Annotated[Path, typer.Argument(help="Where to write them. Made if it is not there.")],
    force: Annotated[bool, option("Keys", "Replace keys that are there already.", "--force")] = False,
) -> None:
    """Make keys for tcp:// endpoints: one pair for engines, one for frontends.

    engine.key and client.key are secrets; engine.pub and client.pub are what the other side needs to know.
    """
    try:
        paths = write_key_set(directory, force=force)
    except KeyFileError as error:
        fail(str(error))
    except OSError as error:
        fail(f"cannot write keys to {directory}: {error.strerror or error}")
    for path in paths:
        typer.echo(path)
