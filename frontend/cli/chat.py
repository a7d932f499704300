"""`foreword chat`: a chat in the terminal with any OpenAI-compatible server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import fail, option
from .server_options import DEFAULT_URL, ApiKey, Model, Url, fail_without_server

if TYPE_CHECKING:
    import asyncio

    from frontend.openai_client import OpenAIClient
    from frontend.terminal.attachments import Attachment
    from frontend.terminal.conversation import Conversation

_CHAT, _SAMPLING = "Chat", "Sampling"

EXAMPLES = """
foreword chat
foreword chat --system "Answer in one sentence." --temperature 0
foreword chat --image cat.png
foreword chat --url http://server:8000/v1 --model llama
git diff | foreword chat --system "Write a commit message." > message
"""

_EXIT_CODES = {"answered": 0, "failed": 1, "stopped": 130}


def chat(
    *,
    url: Url = DEFAULT_URL,
    model: Model = None,
    api_key: ApiKey = None,
    system: Annotated[str | None, option(_CHAT, "System prompt.", metavar="TEXT")] = None,
    image: Annotated[
        list[Path] | None,
        option(_CHAT, "A picture that goes with the first message; repeat for several.", metavar="FILE"),
    ] = None,
    cache_salt: Annotated[
        str | None, option(_CHAT, "Share cached prefixes only with requests of this salt.", metavar="SALT")
    ] = None,
    max_tokens: Annotated[int | None, option(_CHAT, "Most tokens of one answer.", min=1)] = None,
    temperature: Annotated[float | None, option(_SAMPLING, "0 is greedy. Default: the server's.", min=0, max=2)] = None,
    top_p: Annotated[
        float | None, option(_SAMPLING, "Sample from the likeliest tokens of this much probability.", min=0, max=1)
    ] = None,
    top_k: Annotated[int | None, option(_SAMPLING, "Sample from so many of the likeliest tokens.", min=-1)] = None,
    seed: Annotated[int | None, option(_SAMPLING, "Makes the same question have the same answer.")] = None,
) -> None:
    """Chat with a model, and see what each turn finds in the prefix cache.

    Ctrl-C stops an answer, Ctrl-D ends, /help lists the commands. Without a terminal, all of standard input is one
    message; the answer goes to standard output, all else to standard error.
    """
    import asyncio

    from frontend.openai_client import OpenAIClient, ServerError, UnreachableError
    from frontend.terminal.conversation import Conversation

    conversation = Conversation(system, pictures=_attachments(image or []))
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    wished = sampling | {"max_tokens": max_tokens, "cache_salt": cache_salt}
    fields = {name: value for name, value in wished.items() if value is not None}
    try:
        client = OpenAIClient(url, api_key=api_key)
    except ValueError as error:
        fail(str(error))
    with asyncio.Runner() as runner:
        try:
            card = runner.run(client.find_model(model))
            exit_code = _converse(runner, client, fields | {"model": card.id}, conversation)
        except UnreachableError as error:
            fail_without_server(url, str(error))
        except ServerError as error:
            fail(str(error))
        finally:
            runner.run(client.aclose())
    raise typer.Exit(exit_code)


def _converse(runner: asyncio.Runner, client: OpenAIClient, fields: dict[str, Any], conversation: Conversation) -> int:
    from frontend.terminal.screen import Screen
    from frontend.terminal.session import chat as converse
    from frontend.terminal.session import take_turn

    screen = Screen()
    if not sys.stdin.isatty():
        return _EXIT_CODES[take_turn(runner, client, conversation, conversation.ask(_piped_message()), fields, screen)]
    screen.note(f"{fields['model']} at {client.url} · /help lists commands, Ctrl-D ends")
    if conversation.pictures:
        screen.note(f"with the first message: {'; '.join(map(str, conversation.pictures))}")
    converse(runner, client, conversation, fields, screen)
    return 0


def _attachments(files: list[Path]) -> list[Attachment]:
    from frontend.terminal.attachments import read_attachment

    try:
        return [read_attachment(file) for file in files]
    except ValueError as error:
        fail(f"--image: {error}")


def _piped_message() -> str:
    message = sys.stdin.buffer.read().decode(errors="replace").strip()
    if not message:
        fail("there is no message on standard input")
    return message
