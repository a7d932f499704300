"""A chat from its first line to its last."""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing, suppress
from typing import Any, Literal

from frontend.openai_client import Answer, OpenAIClient, ServerError

from .commands import COMMANDS, is_command, run_command
from .conversation import Conversation, Question
from .screen import Screen, cost

Outcome = Literal["answered", "stopped", "failed"]

PROMPT, CONTINUATION_PROMPT = "> ", ". "


def chat(
    runner: asyncio.Runner, client: OpenAIClient, conversation: Conversation, fields: dict[str, Any], screen: Screen
) -> None:
    """Talk until the person ends it. `fields` go into each request beside the messages."""
    _prepare_input()
    while True:
        try:
            line = _read_message(screen)
        except EOFError:
            screen.end_prompt()
            return
        except KeyboardInterrupt:
            screen.end_prompt()
            screen.note("Ctrl-D ends")
            continue
        if is_command(line):
            screen.note(run_command(conversation, line))
        elif line.strip():
            take_turn(runner, client, conversation, conversation.ask(line), fields, screen)


def take_turn(
    runner: asyncio.Runner,
    client: OpenAIClient,
    conversation: Conversation,
    question: Question,
    fields: dict[str, Any],
    screen: Screen,
) -> Outcome:
    """Ask, show and remember.

    Ctrl-C stops the answer and the server's work on it; what had come is kept, since that is what was said. A turn
    that failed is not kept.
    """
    answer = Answer()
    outcome: Outcome = "answered"
    try:
        runner.run(_show(client, fields | {"messages": conversation.messages(question)}, answer, screen))
    except KeyboardInterrupt:
        outcome = "stopped"
    except ServerError as error:
        screen.end_answer()
        screen.error(str(error))
        return "failed"
    screen.end_answer()
    screen.note(cost(answer, stopped=outcome == "stopped"))
    if answer.text:
        conversation.turns.append((question, answer.text))
    return outcome


async def _show(client: OpenAIClient, body: dict[str, Any], answer: Answer, screen: Screen) -> None:
    async with aclosing(client.stream(body, answer)) as deltas:
        async for kind, text in deltas:
            screen.show(kind, text)


def _read_message(screen: Screen) -> str:
    lines = [screen.read_line(PROMPT)]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(screen.read_line(CONTINUATION_PROMPT))
    return "\n".join(lines)


def _prepare_input() -> None:
    # Some Pythons are built without it.
    with suppress(ImportError):
        import readline

        readline.set_completer_delims(" ")
        readline.set_completer(_complete)
        readline.parse_and_bind("bind ^I rl_complete" if "libedit" in (readline.__doc__ or "") else "tab: complete")
    sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]


def _complete(typed: str, state: int) -> str | None:
    """readline's protocol: the `state`-th completion of `typed`."""
    matching = [name for name in COMMANDS if typed and name.startswith(typed)]
    return matching[state] if state < len(matching) else None
