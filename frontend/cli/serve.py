"""`foreword serve [MODEL]`: an engine and a frontend, kept running; with `--engine`, a frontend alone."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from engine_core import DEFAULT_MODEL, EngineConfig
from frontend.api_key import ADMIN_API_KEY_ENV, API_KEY_ENV, api_key_environment, check_api_key, take_api_keys
from frontend.http_config import (
    DEFAULT_DRAIN_TIMEOUT_S,
    DEFAULT_MAX_BODY_BYTES,
    EngineAddress,
    HttpConfig,
    child_argv,
    listen,
)
from frontend.isolation import IsolationMode, check_isolation
from frontend.launch import ChildSpec, engine_child, supervise
from ipc.sockets import make_private_directory
from ipc.threads import WORKER_THREADS

from .attach import engine_addresses, refuse_attached_only, refuse_engine_options
from .engine_options import takes_engine_options
from .log_options import LogFormatOption, LogLevelOption
from .lora_options import with_lora
from .options import A_DAY_S, fail, option, size
from .picture_options import picture_config, takes_picture_options
from .start import begin, find_model, own_names, patience

_HTTP, _ENGINES = "HTTP", "Engines elsewhere"

EXAMPLES = """
foreword serve
foreword serve smollm2
foreword serve path/to/model --max-model-len 4096
foreword serve model.gguf --port 9000 --kv-cache-memory-bytes 2GiB
foreword serve path/to/model --served-model-name mine --dtype float32
foreword serve path/to/model --limit-mm-per-prompt image=4 --allowed-media-domains example.org
foreword serve path/to/model --enable-lora --lora-modules mine=path/to/adapter
foreword serve shapes --enable-lora --lora-modules pirate=shapes-pirate
foreword serve path/to/model --engine ipc:///run/foreword/engine
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
@takes_picture_options
def serve(
    *,
    context: typer.Context,
    engine_settings: dict[str, Any],
    picture_settings: dict[str, Any],
    model: Annotated[
        str,
        typer.Argument(help="A built-in's name, a transformers directory, a .gguf file or a hub id."),
    ] = DEFAULT_MODEL,
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
    ] = WORKER_THREADS,
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
    admin_api_key: Annotated[
        list[str] | None,
        option(
            _HTTP,
            "Key without which nobody resets the prefix cache of all, or loads and unloads LoRA adapters; it opens"
            " everything else, too. Better set"
            f" {ADMIN_API_KEY_ENV}. Default: all clients may, but with --cache-isolation api-key none.",
            callback=_check_api_keys,
            metavar="KEY",
        ),
    ] = None,
    cache_isolation: Annotated[
        IsolationMode,
        option(
            _HTTP,
            "Whose requests share what is cached: everybody's (`none`), those of the same `cache_salt` (`salt`), those"
            " of the same API key and `cache_salt` (`api-key`).",
        ),
    ] = "salt",
    log_format: LogFormatOption = "text",
    log_level: LogLevelOption = "info",
    drain_timeout: Annotated[
        float,
        option(
            _HTTP,
            "Seconds that running requests have to end at SIGTERM; a second signal ends them.",
            min=0,
            max=A_DAY_S,
        ),
    ] = DEFAULT_DRAIN_TIMEOUT_S,
    engine: Annotated[
        list[str] | None,
        option(
            _ENGINES,
            "Endpoint of a running `foreword engine` of the same MODEL: use it and start none. Repeat for several.",
        ),
    ] = None,
    curve_key: Annotated[
        Path | None, option(_ENGINES, "File with this frontend's secret key, for engines at tcp://.")
    ] = None,
    curve_engine_key: Annotated[
        list[Path] | None,
        option(
            _ENGINES,
            "File with the public key of the engines at tcp://; or one for each of them, in their order.",
        ),
    ] = None,
    insecure: Annotated[
        bool, option(_ENGINES, "Talk to engines at tcp:// without keys: whoever is in between reads all.", "--insecure")
    ] = False,
) -> None:
    """Serve MODEL at http://127.0.0.1:8000 until Ctrl-C.

    Two models are built in: `shapes`, the default, looks at simple pictures; `smollm2` talks about anything. A third,
    `gemma3-270m`, can be installed. With --engine, no engine is started.
    """
    begin("serve", log_format, log_level)
    keys = {
        variable: _api_keys(option, variable)
        for variable, option in ((API_KEY_ENV, api_key), (ADMIN_API_KEY_ENV, admin_api_key))
    }
    try:
        check_isolation(cache_isolation, keys[API_KEY_ENV])
    except ValueError as error:
        fail(str(error))
    pictures = picture_config(picture_settings, max_body_bytes=max_body_bytes)
    _check_listenable(host, port)
    if engine:
        refuse_engine_options(context, engine_settings)
        addresses = engine_addresses(engine, curve_key, curve_engine_key or [], insecure=insecure)
    else:
        refuse_attached_only(curve_key=curve_key, curve_engine_key=curve_engine_key, insecure=insecure)
        addresses = ()
    resolved = find_model(model)
    names = tuple(served_model_name or own_names(model, resolved))
    config = HttpConfig(
        engines=addresses,
        engine_model_names=tuple(dict.fromkeys((resolved.name, *names))),
        curve_key_file=None if curve_key is None else str(curve_key.absolute()),
        insecure=insecure,
        model_dir=str(resolved.path),
        model_names=names,
        host=host,
        port=port,
        max_body_bytes=max_body_bytes,
        num_prompt_threads=num_prompt_threads,
        drain_timeout_s=drain_timeout,
        cache_isolation=cache_isolation,
        pictures=pictures,
    )
    if addresses:
        raise typer.Exit(supervise([_http_child(config, keys)], patience(drain_timeout)))
    found = {"model": str(resolved.path), "model_name": names[0]}
    engine_config = EngineConfig(**with_lora(engine_settings, names) | found)
    raise typer.Exit(_serve_with_engine(engine_config, config, keys))


def _serve_with_engine(engine_config: EngineConfig, config: HttpConfig, keys: Mapping[str, Sequence[str]]) -> int:
    sockets = make_private_directory()
    endpoint = f"ipc://{sockets}/engine"
    http = _http_child(msgspec.structs.replace(config, engines=(EngineAddress(endpoint),)), keys)
    try:
        # The frontend is stopped first. Once it has let its requests end, the engine has none left.
        return supervise([engine_child(engine_config, endpoint), http], patience(config.drain_timeout_s))
    finally:
        shutil.rmtree(sockets, ignore_errors=True)


def _http_child(config: HttpConfig, keys: Mapping[str, Sequence[str]]) -> ChildSpec:
    """`keys`: by the environment variable that hands them on."""
    environment: dict[str, str] = {}
    for variable, values in keys.items():
        environment |= api_key_environment(values, variable)
    return ChildSpec("http", child_argv(config), environment=environment)


def _api_keys(option: list[str] | None, variable: str) -> Sequence[str]:
    """Those of the command line go before those of the environment, which are taken out of there in any case."""
    try:
        in_environment = take_api_keys(variable)
    except ValueError as error:
        fail(f"{variable}: {error}")
    return option or in_environment


def _check_listenable(host: str, port: int) -> None:
    # The HTTP process listens itself, so that it can be replaced; this is to say so before minutes of loading.
    try:
        listen(host, port).close()
    except OSError as error:
        fail(f"cannot listen at {host}:{port} (--host, --port): {error.strerror or error}")
