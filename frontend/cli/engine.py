"""`foreword engine [MODEL] --endpoint ENDPOINT`: an engine alone, kept running, for frontends elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from engine_core import DEFAULT_MODEL, EngineConfig
from frontend.launch import EngineKeyFiles, engine_child, supervise
from ipc.endpoints import check_endpoint, is_tcp, socket_path
from ipc.sockets import check_listenable

from .engine_options import takes_engine_options
from .log_options import LogFormatOption, LogLevelOption
from .lora_options import with_lora
from .options import A_DAY_S, fail, option
from .start import begin, find_model, patience

_ENDPOINT = "Endpoint"

EXAMPLES = """
foreword engine --endpoint ipc:///run/foreword/engine
foreword engine path/to/model --endpoint tcp://0.0.0.0:5555 \\
    --curve-key keys/engine.key --curve-authorized keys/client.pub
"""


@takes_engine_options
def engine(
    *,
    engine_settings: dict[str, Any],
    model: Annotated[
        str,
        typer.Argument(help="A built-in's name, a transformers directory, a .gguf file or a hub id."),
    ] = DEFAULT_MODEL,
    endpoint: Annotated[
        str,
        option(
            _ENDPOINT,
            "Where to listen: ipc:///absolute/path, in a directory that is yours alone, or tcp://host:port.",
        ),
    ],
    curve_key: Annotated[
        Path | None, option(_ENDPOINT, "File with the engine's secret key, for tcp:// (`foreword keys` makes one).")
    ] = None,
    curve_authorized: Annotated[
        Path | None,
        option(
            _ENDPOINT, "File with the public keys of frontends that may connect, or a directory of such *.pub files."
        ),
    ] = None,
    insecure: Annotated[
        bool, option(_ENDPOINT, "Listen at tcp:// without keys: whoever reaches it can use it.", "--insecure")
    ] = False,
    served_model_name: Annotated[
        str | None, option(_ENDPOINT, "What to call the model to frontends. Default: its own name.")
    ] = None,
    drain_timeout: Annotated[
        float,
        option(
            _ENDPOINT,
            "Seconds that running requests have to end at SIGTERM; a second signal ends them.",
            min=0,
            max=A_DAY_S,
        ),
    ] = 30.0,
    log_format: LogFormatOption = "text",
    log_level: LogLevelOption = "info",
) -> None:
    """Run an engine for MODEL until SIGTERM or Ctrl-C, without HTTP.

    Frontends attach to it with `foreword serve MODEL --engine ENDPOINT`. If it dies it is started again.
    """
    begin("foreword-engine", log_format, log_level)
    if (curve_key is None) != (curve_authorized is None):
        fail("--curve-key and --curve-authorized go together")
    key_files = None
    if curve_key is not None and curve_authorized is not None:
        key_files = EngineKeyFiles(curve_key.absolute(), curve_authorized.absolute())
    try:
        check_endpoint(endpoint)
        if not is_tcp(endpoint):
            socket_path(endpoint).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        keys = None if key_files is None else key_files.load()
        check_listenable(endpoint, keys=keys, insecure=insecure)
    except (ValueError, OSError) as error:
        fail(str(error))
    resolved = find_model(model)
    names = {"model": str(resolved.path), "model_name": served_model_name or resolved.name}
    child = engine_child(
        EngineConfig(**with_lora(engine_settings, [names["model_name"]]) | names),
        endpoint,
        key_files=key_files,
        insecure=insecure,
        drain_timeout_s=drain_timeout,
    )
    raise typer.Exit(supervise([child], patience(drain_timeout)))
