"""The command line: `foreword serve [MODEL]`."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal, NoReturn

import typer

from engine_core import EngineConfig, ModelNotFoundError, ResolvedModel, resolve_model
from engine_core.config import FreeOrder, FullPromptHit, HashAlgo, SchedulingPolicy
from ipc.sockets import make_private_directory

from .cli_help import PanelledCommand
from .http_config import DEFAULT_MAX_BODY_BYTES, HttpConfig, child_argv, listen
from .launch import ChildSpec, engine_child, supervise
from .sizes import parse_size
from .version import foreword_version

USER_ERROR_EXIT_CODE = 2

DType = Literal["auto", "float32", "bfloat16", "float16"]

_ENGINE = EngineConfig()
_HTTP, _MODEL, _MEMORY, _SCHEDULER, _CACHE = "HTTP", "Model", "KV cache memory", "Scheduler", "Prefix cache"

app = typer.Typer(
    name="foreword",
    help="Serve a language model over the OpenAI API, and never compute a prefix twice.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of the `foreword` command."""
    app()


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


def _option(panel: str, help_text: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, help=help_text, **settings)


def _size(text: str | int) -> int:
    try:
        return parse_size(str(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _check_names(names: list[str] | None) -> list[str] | None:
    if names and not all(name.strip() for name in names):
        raise typer.BadParameter("a name must not be empty")
    return names


@app.command(cls=PanelledCommand)
def serve(
    model: Annotated[
        str,
        typer.Argument(help="A built-in's name, a transformers directory, a .gguf file or a hub id."),
    ] = "smollm2",
    host: Annotated[str, _option(_HTTP, "Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, _option(_HTTP, "Port to listen at; 0 takes a free one.", min=0, max=65535)] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        _option(
            _HTTP,
            "Name clients call the model by; repeat for several. Default: the model's own.",
            callback=_check_names,
        ),
    ] = None,
    max_body_bytes: Annotated[
        int, _option(_HTTP, "Largest request body, for instance 32MiB.", parser=_size, metavar="SIZE")
    ] = DEFAULT_MAX_BODY_BYTES,
    num_prompt_threads: Annotated[
        int, _option(_HTTP, "Threads that tokenize short prompts (long ones have their own).", min=1)
    ] = 2,
    dtype: Annotated[
        DType,
        _option(
            _MODEL,
            "Of weights and activations. auto: bfloat16 where the device computes in it, else float32.",
        ),
    ] = _ENGINE.dtype,
    device: Annotated[str, _option(_MODEL, "auto: CUDA where there is one, else the CPU.")] = _ENGINE.device,
    max_model_len: Annotated[
        int | None,
        _option(_MODEL, "Most tokens of one request, prompt and output. Default: what the model was made for.", min=2),
    ] = None,
    num_threads: Annotated[int | None, _option(_MODEL, "CPU threads for the model.", min=1)] = None,
    block_size: Annotated[int, _option(_MEMORY, "Tokens of one KV block.", min=1)] = _ENGINE.block_size,
    num_blocks: Annotated[
        int | None,
        _option(
            _MEMORY,
            "Size of the KV pool in blocks; goes before the other two.",
            "--num-blocks",
            "--num-gpu-blocks-override",
            min=1,
        ),
    ] = None,
    kv_cache_memory_bytes: Annotated[
        int | None,
        _option(_MEMORY, "Memory for the KV pool, for instance 2GiB.", parser=_size, metavar="SIZE"),
    ] = None,
    gpu_memory_utilization: Annotated[
        float, _option(_MEMORY, "Share of the GPU's memory for weights, activations and KV pool.", min=0.01, max=1.0)
    ] = _ENGINE.gpu_memory_utilization,
    max_num_seqs: Annotated[int, _option(_SCHEDULER, "Most requests in one step.", min=1)] = _ENGINE.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int, _option(_SCHEDULER, "Most tokens in one step, prefill and decode together.", min=1)
    ] = _ENGINE.max_num_batched_tokens,
    enable_chunked_prefill: Annotated[
        bool, _option(_SCHEDULER, "Compute long prompts over several steps, beside others.")
    ] = _ENGINE.enable_chunked_prefill,
    long_prefill_token_threshold: Annotated[
        int, _option(_SCHEDULER, "Most prefill tokens of one request in a step while others wait; 0: no limit.", min=0)
    ] = _ENGINE.long_prefill_token_threshold,
    scheduling_policy: Annotated[
        SchedulingPolicy,
        _option(_SCHEDULER, "fcfs: first come, first served. priority: lower `priority` first."),
    ] = _ENGINE.scheduling_policy,
    reserve_full_sequence: Annotated[
        bool, _option(_SCHEDULER, "Admit a request only if the pool has room for its whole present sequence.")
    ] = _ENGINE.reserve_full_sequence,
    watermark: Annotated[
        float, _option(_SCHEDULER, "Share of the pool kept free at admission.", min=0.0, max=0.99)
    ] = _ENGINE.watermark,
    enable_prefix_caching: Annotated[
        bool, _option(_CACHE, "Share the KV cache of equal prefixes between requests.")
    ] = _ENGINE.enable_prefix_caching,
    prefix_caching_hash_algo: Annotated[
        HashAlgo,
        _option(_CACHE, "How blocks are identified; the xxhash ones are not collision proof."),
    ] = _ENGINE.prefix_caching_hash_algo,
    prefix_caching_hash_seed: Annotated[
        str | None, _option(_CACHE, "Root of the hash chains in the _cbor and xxhash modes.")
    ] = None,
    full_prompt_hit: Annotated[
        FullPromptHit,
        _option(_CACHE, "What to compute again when a whole prompt is cached."),
    ] = _ENGINE.full_prompt_hit,
    free_order: Annotated[FreeOrder, _option(_CACHE, "Where freed blocks go in the free queue.")] = _ENGINE.free_order,
) -> None:
    """Serve MODEL at http://127.0.0.1:8000 until Ctrl-C.

    Without MODEL, the built-in SmolLM2-135M-Instruct is served.
    """
    settings = locals()
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format=f"%(asctime)s serve[{os.getpid()}] %(levelname)s %(message)s"
    )
    _check_listenable(host, port)
    _exit_on_signals()
    try:
        resolved = resolve_model(model)
    except ModelNotFoundError as error:
        _fail(str(error))
    engine_settings = {name: settings[name] for name in EngineConfig.__struct_fields__ if name in settings}
    names = tuple(served_model_name or _own_names(model, resolved))
    engine_config = EngineConfig(**engine_settings | {"model": str(resolved.path), "model_name": names[0]})
    sockets = make_private_directory()
    try:
        exit_code = _serve(engine_config, sockets, model_names=names, http_settings=settings)
    finally:
        shutil.rmtree(sockets, ignore_errors=True)
    raise typer.Exit(exit_code)


def _serve(
    engine_config: EngineConfig, sockets: Path, *, model_names: tuple[str, ...], http_settings: dict[str, Any]
) -> int:
    endpoint = f"ipc://{sockets}/engine"
    http_config = HttpConfig(
        endpoint=endpoint,
        model_dir=engine_config.model,
        model_names=model_names,
        **{name: http_settings[name] for name in ("host", "port", "max_body_bytes", "num_prompt_threads")},
    )
    return supervise([engine_child(engine_config, endpoint), ChildSpec("http", child_argv(http_config))])


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
        _fail(f"cannot listen at {host}:{port} (--host, --port): {error.strerror or error}")


def _fail(message: str) -> NoReturn:
    typer.echo(f"foreword: {message}", err=True)
    raise typer.Exit(USER_ERROR_EXIT_CODE)
