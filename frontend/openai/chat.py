"""`POST /v1/chat/completions`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from msgspec import UNSET

from frontend.choice import ChoiceReader, Part
from frontend.prepared import PreparedRequest, TokenCounts, run
from frontend.refusals import client_errors
from frontend.serving import Serving
from frontend.streaming import event
from ipc.vocabulary import TokenLogprob

from .logprobs import chat_logprobs, prompt_logprobs
from .protocol import ChatCompletionRequest
from .refusals import field_names
from .responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ToolCall,
    usage_of,
)
from .tool_calls import CallNumbers


async def answer_chat(
    serving: Serving, request: ChatCompletionRequest, prepared: PreparedRequest, counts: TokenCounts, answer_id: str
) -> bytes:
    """The whole answer, as JSON, counted in `counts`. Raises ApiError."""
    readers = [ChoiceReader(prepared.tools) for _ in range(prepared.num_choices)]
    parts: list[list[Part]] = [[] for _ in readers]
    of_prompt: list[TokenLogprob | None] | None = None
    with client_errors(serving, field_names(request)):
        async with aclosing(run(serving, prepared, answer_id)) as deltas:
            async for index, delta in deltas:
                counts.add(index, delta)
                parts[index] += readers[index].read(delta)
                of_prompt = delta.prompt_logprobs
    choices = [_choice(index, parts_of_it) for index, parts_of_it in enumerate(parts)]
    answer = ChatCompletion(answer_id, int(time.time()), prepared.model_name, choices, usage_of(counts))
    if prepared.logprobs is not None or prepared.prompt_logprobs is not None:
        # In a thread: there may be many tokens.
        await asyncio.to_thread(_show_logprobs, serving, prepared, answer, parts, of_prompt)
    return msgspec.json.encode(answer)


def _choice(index: int, parts: list[Part]) -> ChatChoice:
    """Of all its parts."""
    text = "".join(part.text for part in parts)
    numbers = CallNumbers()
    shown = [call for part in parts if (call := numbers.shown(part)) is not None]
    calls = [ToolCall(id=call.id, function=call.function) for call in shown]
    message = AssistantMessage(text or None, tool_calls=calls) if calls else AssistantMessage(text)
    finish_reason = parts[-1].finish_reason
    assert finish_reason is not None
    return ChatChoice(message, finish_reason, index, stop_reason=parts[-1].stop_reason)


def _show_logprobs(
    serving: Serving,
    prepared: PreparedRequest,
    answer: ChatCompletion,
    parts: list[list[Part]],
    of_prompt: list[TokenLogprob | None] | None,
) -> None:
    if prepared.logprobs is not None:
        for choice, parts_of_it in zip(answer.choices, parts, strict=True):
            tokens = [token for part in parts_of_it for token in part.scored_tokens]
            choice.logprobs = chat_logprobs(tokens, prepared.logprobs, serving.token_bytes)
    if prepared.prompt_logprobs is not None and of_prompt is not None:
        answer.prompt_logprobs = prompt_logprobs(of_prompt, prepared.prompt_logprobs, serving.token_bytes)


async def stream_chat(
    serving: Serving, request: ChatCompletionRequest, prepared: PreparedRequest, counts: TokenCounts, answer_id: str
) -> AsyncGenerator[bytes]:
    """The answer as server-sent events; chunks of different choices mix. The first comes with the first token.

    What was sent so far is counted in `counts`. Raises ApiError.
    """
    chunk = ChatCompletionChunk(answer_id, int(time.time()), prepared.model_name, [])
    if prepared.include_usage:
        chunk.usage = None

    def choice_event(choice: ChatChunkChoice) -> bytes:
        chunk.choices = [choice]
        if prepared.continuous_usage:
            chunk.usage = usage_of(counts)
        return event(msgspec.json.encode(chunk))

    readers = [ChoiceReader(prepared.tools) for _ in range(prepared.num_choices)]
    numbers = [CallNumbers() for _ in readers]
    begun: set[int] = set()
    with client_errors(serving, field_names(request)):
        async with aclosing(run(serving, prepared, answer_id)) as deltas:
            async for index, delta in deltas:
                counts.add(index, delta)
                events = b""
                if index not in begun:
                    begun.add(index)
                    events = choice_event(ChatChunkChoice(ChatDelta(role="assistant", content=""), index))
                for part in readers[index].read(delta):
                    call = numbers[index].shown(part)
                    choice = ChatChunkChoice(
                        ChatDelta(content=part.text or UNSET, tool_calls=UNSET if call is None else [call]),
                        index,
                        finish_reason=part.finish_reason,
                        stop_reason=UNSET if part.finish_reason is None else part.stop_reason,
                    )
                    if prepared.logprobs is not None and part.scored_tokens:
                        choice.logprobs = chat_logprobs(part.scored_tokens, prepared.logprobs, serving.token_bytes)
                    events += choice_event(choice)
                if events:
                    yield events
    if prepared.include_usage:
        chunk.choices, chunk.usage = [], usage_of(counts)
        yield event(msgspec.json.encode(chunk))
    yield event(b"[DONE]")
