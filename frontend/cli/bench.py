"""`foreword bench`: measure any OpenAI-compatible server."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from frontend.bench.results import Parts

from .options import A_DAY_S, fail, option
from .server_options import DEFAULT_URL, ApiKey, Model, Url, fail_without_server

if TYPE_CHECKING:
    from rich.console import Console

    from frontend.bench.results import Result

_WORK, _RESULT = "What to measure", "Result"
_PART_NAMES = Parts.__struct_fields__
_STDOUT = Path("-")

EXAMPLES = """
foreword bench --quick
foreword bench --parts prefix,chats --tokenizer path/to/model
foreword bench --url http://server:8000/v1 --model llama --out run.json
foreword bench --quick --out - | jq .parts.prefix
"""


def _split_parts(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in _PART_NAMES]:
        raise typer.BadParameter(f"{unknown[0]!r} is no part; there are {', '.join(_PART_NAMES)}")
    return [name for name in _PART_NAMES if name in names]


def bench(
    *,
    url: Url = DEFAULT_URL,
    model: Model = None,
    api_key: ApiKey = None,
    parts: Annotated[
        str,
        option(
            _WORK,
            "Which parts, with commas between them. prefix: time to first token, cold and warm. decode: one stream."
            " streams: eight at once. chats: turn after turn. shared: a common system prompt. unique: nothing in"
            " common. tiny: one token.",
        ),
    ] = ",".join(_PART_NAMES),
    quick: Annotated[bool, option(_WORK, "Fewer and smaller requests: a first look.", "--quick")] = False,
    seed: Annotated[
        int | None,
        option(_WORK, "The same seed makes the same prompts. Default: from the clock, so that cold is cold."),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        option(_WORK, "The model's directory, to size prompts exactly. Default: as the server counts.", metavar="DIR"),
    ] = None,
    timeout: Annotated[
        float, option(_WORK, "Seconds after which a request counts as failed.", min=0.1, max=A_DAY_S)
    ] = 300.0,
    out: Annotated[
        Path | None, option(_RESULT, "Write the result as JSON; - is standard output.", metavar="FILE")
    ] = None,
) -> None:
    """Measure a server of the OpenAI API: what its prefix cache saves, and how fast it is.

    Exits with 1 if any request failed. Runs on the same server should have different seeds, or the prompts are cached.
    """
    from rich.console import Console

    from frontend.bench.report import print_report

    if out is not None and out != _STDOUT:
        _check_writable(out)
    notes = Console(stderr=True, highlight=False, markup=False)
    seed = time.time_ns() // 1_000_000 if seed is None else seed
    wished = {"model": model, "seed": seed, "quick": quick, "tokenizer": tokenizer, "timeout_s": timeout}
    result, was_interrupted = _measure(notes, _split_parts(parts), url, api_key, wished)
    print_report(result, notes if out == _STDOUT else Console(highlight=False))
    if out is not None:
        _write(result, out)
    raise typer.Exit(130 if was_interrupted else int(bool(result.failures) or not result.complete))


def _measure(
    notes: Console, parts: list[str], url: str, api_key: str | None, wished: dict[str, Any]
) -> tuple[Result, bool]:
    """What was found, if only until somebody pressed Ctrl-C."""
    import asyncio

    from frontend.bench.report import progress_report
    from frontend.bench.run import prepare, run_parts
    from frontend.openai_client import OpenAIClient, ServerError, UnreachableError

    try:
        client = OpenAIClient(url, api_key=api_key)
    except ValueError as error:
        fail(str(error))
    with asyncio.Runner() as runner:
        try:
            prepared = runner.run(prepare(client, **wished))
            try:
                run = prepared.result.run
                notes.print(f"{run.model} at {run.url}, --seed {run.seed}", style="dim")
                with progress_report(notes) as watcher:
                    runner.run(run_parts(prepared, parts, watcher))
            except KeyboardInterrupt:
                return prepared.result, True
            return prepared.result, False
        except UnreachableError as error:
            fail_without_server(url, str(error))
        except ServerError as error:
            fail(str(error))
        except ValueError as error:
            fail(f"--tokenizer: {error}")
        finally:
            runner.run(client.aclose())


def _check_writable(file: Path) -> None:
    # To say so before minutes of measuring.
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        fail(f"--out: cannot write {file}")


def _write(result: Result, file: Path) -> None:
    import msgspec

    content = msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"
    if file == _STDOUT:
        sys.stdout.buffer.write(content)
        return
    try:
        file.write_bytes(content)
    except OSError as error:
        fail(f"--out: cannot write {file}: {error.strerror or error}")
