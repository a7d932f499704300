"""`POST /v1/chat/completions`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from msgspec import UNSET

from frontend.continuation import ScoredToken
from frontend.streaming import event
from ipc.messages import TokenLogprob

from .logprobs import chat_logprobs, prompt_logprobs
from .prepare import prepare_chat
from .prepared import PreparedRequest, TokenCounts, run
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
    choices = [ChatChoice(AssistantMessage(""), "stop", index) for index in range(prepared.num_choices)]
    texts: list[list[str]] = [[] for _ in choices]
    scored: list[list[ScoredToken]] = [[] for _ in choices]
    of_prompt: list[TokenLogprob | None] | None = None
    with client_errors(serving, request):
        async with aclosing(run(serving, prepared, answer_id)) as deltas:
            async for index, delta in deltas:
                counts.add(index, delta)
                texts[index].append(delta.text)
                scored[index] += delta.scored_tokens
                if delta.finish_reason is not None:
                    choices[index].finish_reason, choices[index].stop_reason = delta.finish_reason, delta.stop_reason
                of_prompt = delta.prompt_logprobs
    for choice, parts in zip(choices, texts, strict=True):
        choice.message.content = "".join(parts)
    answer = ChatCompletion(answer_id, int(time.time()), prepared.model_name, choices, counts.usage())
    if prepared.logprobs is not None or prepared.prompt_logprobs is not None:
        # In a thread: there may be many tokens.
        await asyncio.to_thread(_show_logprobs, serving, prepared, answer, scored, of_prompt)
    return msgspec.json.encode(answer)


def _show_logprobs(
    serving: Serving,
    prepared: PreparedRequest,
    answer: ChatCompletion,
    scored: list[list[ScoredToken]],
    of_prompt: list[TokenLogprob | None] | None,
) -> None:
    if prepared.logprobs is not None:
        for choice, tokens in zip(answer.choices, scored, strict=True):
            choice.logprobs = chat_logprobs(tokens, prepared.logprobs, serving.token_bytes)
    if prepared.prompt_logprobs is not None and of_prompt is not None:
        answer.prompt_logprobs = prompt_logprobs(of_prompt, prepared.prompt_logprobs, serving.token_bytes)


async def stream_chat(serving: Serving, request: ChatCompletionRequest, answer_id: str) -> AsyncGenerator[bytes]:
    """The answer as server-sent events; chunks of different choices mix. The first comes with the first token.

    Raises ApiError.
    """
    prepared = await prepare_chat(serving, request)
    counts = TokenCounts(prepared)
    chunk = ChatCompletionChunk(answer_id, int(time.time()), prepared.model_name, [])
    if prepared.include_usage:
        chunk.usage = None

    def choice_event(choice: ChatChunkChoice) -> bytes:
        chunk.choices = [choice]
        if prepared.continuous_usage:
            chunk.usage = counts.usage()
        return event(msgspec.json.encode(chunk))

    begun: set[int] = set()
    with client_errors(serving, request):
        async with aclosing(run(serving, prepared, answer_id)) as deltas:
            async for index, delta in deltas:
                counts.add(index, delta)
                events = b""
                if index not in begun:
                    begun.add(index)
                    events = choice_event(ChatChunkChoice(ChatDelta(role="assistant", content=""), index))
                if delta.text or delta.finish_reason is not None:
                    choice = ChatChunkChoice(
                        ChatDelta(content=delta.text or UNSET),
                        index,
                        finish_reason=delta.finish_reason,
                        stop_reason=UNSET if delta.finish_reason is None else delta.stop_reason,
                    )
                    if prepared.logprobs is not None and delta.scored_tokens:
                        choice.logprobs = chat_logprobs(delta.scored_tokens, prepared.logprobs, serving.token_bytes)
                    events += choice_event(choice)
                if events:
                    yield events
    if prepared.include_usage:
        chunk.choices, chunk.usage = [], counts.usage()
        yield event(msgspec.json.encode(chunk))
    yield event(b"[DONE]")
