"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from msgspec import UNSET

from frontend.streaming import event

from .prepare import prepare_chat
from .prepared import TokenCounts, run
from .protocol import ChatCompletionRequest
from .refusals import client_errors
from .responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
)
from .serving import Serving


async def answer_chat(serving: Serving, request: ChatCompletionRequest, answer_id: str) -> bytes:
    """The whole answer, as JSON. Raises ApiError."""
    prepared = await prepare_chat(serving, request)
    counts = TokenCounts(prepared)
    choice = ChatChoice(AssistantMessage(""), "stop")
    texts: list[str] = []
    with client_errors(serving, request):
        async with aclosing(run(serving, prepared, answer_id)) as deltas:
            async for index, delta in deltas:
                counts.add(index, delta)
                texts.append(delta.text)
                if delta.finish_reason is not None:
                    choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
    choice.message.content = "".join(texts)
    return msgspec.json.encode(
        ChatCompletion(answer_id, int(time.time()), prepared.model_name, [choice], counts.usage())
    )


async def stream_chat(serving: Serving, request: ChatCompletionRequest, answer_id: str) -> AsyncGenerator[bytes]:
    """The answer as server-sent events. The first item comes with the first token. Raises ApiError."""
    prepared = await prepare_chat(serving, request)
    counts = TokenCounts(prepared)
    chunk = ChatCompletionChunk(answer_id, int(time.time()), prepared.model_name, [])
    if prepared.include_usage:
        chunk.usage = None

    def choice_event(choice: ChatChunkChoice) -> bytes:
        chunk.choices = [choice]
        return event(msgspec.json.encode(chunk))

    events = choice_event(ChatChunkChoice(ChatDelta(role="assistant", content="")))
    with client_errors(serving, request):
        async with aclosing(run(serving, prepared, answer_id)) as deltas:
            async for index, delta in deltas:
                counts.add(index, delta)
                if delta.text or delta.finish_reason is not None:
                    events += choice_event(
                        ChatChunkChoice(
                            ChatDelta(content=delta.text or UNSET),
                            finish_reason=delta.finish_reason,
                            stop_reason=UNSET if delta.finish_reason is None else delta.stop_reason,
                        )
                    )
                if events:
                    yield events
                events = b""
    if prepared.include_usage:
        chunk.choices, chunk.usage = [], counts.usage()
        yield event(msgspec.json.encode(chunk))
    yield event(b"[DONE]")
