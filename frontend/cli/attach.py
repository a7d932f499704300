"""The options of `foreword serve` that concern engines elsewhere, made sense of."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

import typer

from frontend.http_config import EngineAddress
from ipc.curve import check_security
from ipc.endpoints import check_endpoint, is_tcp
from ipc.key_files import load_key_pair, load_public_key

from .options import fail


def engine_addresses(
    endpoints: Sequence[str], curve_key: Path | None, engine_keys: Sequence[Path], *, insecure: bool
) -> tuple[EngineAddress, ...]:
    """Each engine with the key it must prove to have. What does not fit together ends the command."""
    if (curve_key is None) != (not engine_keys):
        fail("--curve-key and --curve-engine-key go together")
    num_tcp = sum(map(is_tcp, endpoints))
    if len(engine_keys) not in {0, 1, num_tcp}:
        fail(
            f"--curve-engine-key was given {len(engine_keys)} times for {num_tcp} engines at tcp://; give it once or"
            " for each of them"
        )
    keys = itertools.cycle(engine_keys)
    addresses = []
    try:
        if curve_key is not None:
            load_key_pair(curve_key)
        for endpoint in endpoints:
            check_endpoint(endpoint)
            check_security(endpoint, has_keys=is_tcp(endpoint) and bool(engine_keys), insecure=insecure)
            key_file = next(keys, None) if is_tcp(endpoint) else None
            if key_file is not None:
                load_public_key(key_file)
            addresses.append(EngineAddress(endpoint, None if key_file is None else str(key_file.absolute())))
    except ValueError as error:
        fail(str(error))
    return tuple(addresses)


def refuse_engine_options(context: typer.Context, names: Iterable[str]) -> None:
    """End the command if one of these options was given."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            flag = "--" + name.replace("_", "-")
            fail(f"{flag} is a setting of the engine: with --engine, give it to the `foreword engine` that runs there")


def refuse_attached_only(*, curve_key: Path | None, curve_engine_key: list[Path] | None, insecure: bool) -> None:
    """End the command if an option was given that has no meaning without engines elsewhere."""
    given = {"--curve-key": curve_key, "--curve-engine-key": curve_engine_key, "--insecure": insecure}
    for flag, value in given.items():
        if value:
            fail(f"{flag} is for engines elsewhere: it needs --engine")
