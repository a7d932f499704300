"""`foreword serve [MODEL]`: an engine and a frontend, kept running."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from engine_core import EngineConfig, ModelNotFoundError, ResolvedModel, resolve_model
from frontend.api_key import API_KEY_ENV, api_key_environment, check_api_key, take_api_keys
from frontend.http_config import DEFAULT_MAX_BODY_BYTES, HttpConfig, child_argv, listen
from frontend.launch import ChildSpec, engine_child, supervise
from ipc.sockets import make_private_directory

from .engine_options import takes_engine_options
from .log_options import LogFormatOption, LogLevelOption, log_as
from .options import fail, option, size

_HTTP = "HTTP"

EXAMPLES = """
foreword serve
foreword serve path/to/model --max-model-len 4096
foreword serve model.gguf --port 9000 --kv-cache-memory-bytes 2GiB
foreword serve path/to/model --served-model-name mine --dtype float32
"""


def _check_names(names: list[str] | None) -> list[str] | None:
    if names and not all(name.strip() for name in names):
        raise typer.BadParameter("a name must not be empty")
    return names


def _check_api_keys(keys: list[str] | None) -> list[str] | None:
    try:
        return [check_api_key(key) for key in keys] if keys else None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@takes_engine_options
def serve(
    *,
    engine_settings: dict[str, Any],
    model: Annotated[
        str,
        typer.Argument(help="A built-in's name, a transformers directory, a .gguf file or a hub id."),
    ] = "smollm2",
    host: Annotated[str, option(_HTTP, "Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, option(_HTTP, "Port to listen at; 0 takes a free one.", min=0, max=65535)] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        option(
            _HTTP,
            "Name clients call the model by; repeat for several. Default: the model's own.",
            callback=_check_names,
        ),
    ] = None,
    max_body_bytes: Annotated[
        int, option(_HTTP, "Largest request body, for instance 32MiB.", parser=size, metavar="SIZE")
    ] = DEFAULT_MAX_BODY_BYTES,
    num_prompt_threads: Annotated[
        int, option(_HTTP, "Threads that tokenize short prompts (long ones have their own).", min=1)
    ] = 2,
    api_key: Annotated[
        list[str] | None,
        option(
            _HTTP,
            "Key that clients must send as `Authorization: Bearer KEY`; repeat for several. Others on this machine see"
            f" arguments: better set {API_KEY_ENV} (several keys: separated by commas). Default: no key is needed.",
            callback=_check_api_keys,
            metavar="KEY",
        ),
    ] = None,
    log_format: LogFormatOption = "text",
    log_level: LogLevelOption = "info",
) -> None:
    """Serve MODEL at http://127.0.0.1:8000 until Ctrl-C.

    Without MODEL, the built-in SmolLM2-135M-Instruct is served.
    """
    http_settings = {
        "host": host,
        "port": port,
        "max_body_bytes": max_body_bytes,
        "num_prompt_threads": num_prompt_threads,
    }
    log_as("serve", log_format, log_level)
    try:
        keys_in_environment = take_api_keys()
    except ValueError as error:
        fail(f"{API_KEY_ENV}: {error}")
    _check_listenable(host, port)
    _exit_on_signals()
    try:
        resolved = resolve_model(model)
    except ModelNotFoundError as error:
        fail(str(error))
    names = tuple(served_model_name or _own_names(model, resolved))
    engine_config = EngineConfig(**engine_settings | {"model": str(resolved.path), "model_name": names[0]})
    sockets = make_private_directory()
    try:
        exit_code = _serve(
            engine_config,
            sockets,
            model_names=names,
            http_settings=http_settings,
            api_keys=api_key or keys_in_environment,
        )
    finally:
        shutil.rmtree(sockets, ignore_errors=True)
    raise typer.Exit(exit_code)


def _serve(
    engine_config: EngineConfig,
    sockets: Path,
    *,
    model_names: tuple[str, ...],
    http_settings: dict[str, Any],
    api_keys: Sequence[str],
) -> int:
    endpoint = f"ipc://{sockets}/engine"
    http_config = HttpConfig(
        endpoint=endpoint,
        model_dir=engine_config.model,
        model_names=model_names,
        **http_settings,
    )
    http = ChildSpec("http", child_argv(http_config), environment=api_key_environment(api_keys))
    return supervise([engine_child(engine_config, endpoint), http])


def _own_names(model: str, resolved: ResolvedModel) -> tuple[str, ...]:
    """The model's name, and what it was asked for by, unless that is merely where its file lies."""
    return (resolved.name,) if Path(model).expanduser().is_file() else tuple(dict.fromkeys((resolved.name, model)))


def _exit_on_signals() -> None:
    """Until the supervisor has handlers of its own, let a signal unwind the stack, so that what was begun is undone."""

    def leave(number: int, _: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)


def _check_listenable(host: str, port: int) -> None:
    # The HTTP process listens itself, so that it can be replaced; this is to say so before minutes of loading.
    try:
        listen(host, port).close()
    except OSError as error:
        fail(f"cannot listen at {host}:{port} (--host, --port): {error.strerror or error}")
