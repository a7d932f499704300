"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from frontend.continuation import ScoredToken, TextDelta
from frontend.prepared import PreparedRequest, TokenCounts, run
from frontend.refusals import client_errors
from frontend.serving import Serving
from frontend.streaming import event

from .echo import with_prompts
from .logprobs import completion_logprobs, prompt_logprobs
from .protocol import CompletionRequest
from .refusals import field_names
from .responses import Completion, CompletionChoice, usage_of


async def answer_completion(
    serving: Serving, request: CompletionRequest, prepared: PreparedRequest, counts: TokenCounts, answer_id: str
) -> bytes:
    """The answer as JSON, counted in `counts`: `n` choices per prompt, in the prompts' order. Raises ApiError."""
    choices = [CompletionChoice(index, "", None) for index in range(prepared.num_choices)]
    texts: list[list[str]] = [[] for _ in choices]
    scored: list[list[ScoredToken]] = [[] for _ in choices]
    last: dict[int, TextDelta] = {}
    with client_errors(serving, field_names(request)):
        async with aclosing(_deltas(serving, prepared, answer_id)) as deltas:
            async for index, delta in deltas:
                counts.add(index, delta)
                texts[index].append(delta.text)
                scored[index] += delta.scored_tokens
                last[index] = delta
    for index, choice in enumerate(choices):
        delta = last[index]
        choice.text = "".join(texts[index])
        choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
    if prepared.logprobs is not None or prepared.prompt_logprobs is not None:
        # In a thread: there may be many tokens.
        await asyncio.to_thread(_show_logprobs, serving, prepared, choices, scored, last)
    return msgspec.json.encode(
        Completion(answer_id, int(time.time()), prepared.model_name, choices, usage=usage_of(counts))
    )


def _show_logprobs(
    serving: Serving,
    prepared: PreparedRequest,
    choices: list[CompletionChoice],
    scored: list[list[ScoredToken]],
    last: dict[int, TextDelta],
) -> None:
    for index, choice in enumerate(choices):
        if prepared.logprobs is not None:
            choice.logprobs = completion_logprobs(scored[index], prepared.logprobs, serving.token_bytes)
        entries = last[index].prompt_logprobs
        if prepared.prompt_logprobs is not None and entries is not None:
            choice.prompt_logprobs = prompt_logprobs(entries, prepared.prompt_logprobs, serving.token_bytes)


async def stream_completion(
    serving: Serving, request: CompletionRequest, prepared: PreparedRequest, counts: TokenCounts, answer_id: str
) -> AsyncGenerator[bytes]:
    """The answer as server-sent events; chunks of different choices mix. What was sent so far is counted in `counts`.

    Raises ApiError.
    """
    chunk = Completion(answer_id, int(time.time()), prepared.model_name, [])
    if prepared.include_usage:
        chunk.usage = None
    with client_errors(serving, field_names(request)):
        async with aclosing(_deltas(serving, prepared, answer_id)) as deltas:
            async for index, delta in deltas:
                counts.add(index, delta)
                if not delta.text and not delta.scored_tokens and delta.finish_reason is None:
                    continue
                choice = CompletionChoice(index, delta.text, delta.finish_reason, stop_reason=delta.stop_reason)
                if prepared.logprobs is not None and delta.scored_tokens:
                    choice.logprobs = completion_logprobs(delta.scored_tokens, prepared.logprobs, serving.token_bytes)
                chunk.choices = [choice]
                if prepared.continuous_usage:
                    chunk.usage = usage_of(counts)
                yield event(msgspec.json.encode(chunk))
    if prepared.include_usage:
        chunk.choices, chunk.usage = [], usage_of(counts)
        yield event(msgspec.json.encode(chunk))
    yield event(b"[DONE]")


def _deltas(serving: Serving, prepared: PreparedRequest, answer_id: str) -> AsyncGenerator[tuple[int, TextDelta]]:
    deltas = run(serving, prepared, answer_id)
    return with_prompts(serving, prepared, deltas) if prepared.prompt_texts else deltas
