"""`POST /v1/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from frontend.streaming import event

from .prepare import prepare_completion
from .prepared import TokenCounts, run
from .protocol import CompletionRequest
from .refusals import client_errors
from .responses import Completion, CompletionChoice
from .serving import Serving


async def answer_completion(serving: Serving, request: CompletionRequest, answer_id: str) -> bytes:
    """The whole answer, as JSON: one choice per prompt, in the prompts' order. Raises ApiError."""
    prepared = await prepare_completion(serving, request)
    counts = TokenCounts(prepared)
    choices = [CompletionChoice(index, "", None) for index in range(len(prepared.prompts))]
    texts: list[list[str]] = [[] for _ in choices]
    with client_errors(serving, request):
        async with aclosing(run(serving, prepared, answer_id)) as deltas:
            async for index, delta in deltas:
                counts.add(index, delta)
                texts[index].append(delta.text)
                choices[index].finish_reason, choices[index].stop_reason = delta.finish_reason, delta.stop_reason
    for choice, parts in zip(choices, texts, strict=True):
        choice.text = "".join(parts)
    return msgspec.json.encode(
        Completion(answer_id, int(time.time()), prepared.model_name, choices, usage=counts.usage())
    )


async def stream_completion(serving: Serving, request: CompletionRequest, answer_id: str) -> AsyncGenerator[bytes]:
    """The answer as server-sent events; chunks of different choices mix. Raises ApiError."""
    prepared = await prepare_completion(serving, request)
    counts = TokenCounts(prepared)
    chunk = Completion(answer_id, int(time.time()), prepared.model_name, [])
    if prepared.include_usage:
        chunk.usage = None
    with client_errors(serving, request):
        async with aclosing(run(serving, prepared, answer_id)) as deltas:
            async for index, delta in deltas:
                counts.add(index, delta)
                if delta.text or delta.finish_reason is not None:
                    chunk.choices = [
                        CompletionChoice(index, delta.text, delta.finish_reason, stop_reason=delta.stop_reason)
                    ]
                    yield event(msgspec.json.encode(chunk))
    if prepared.include_usage:
        chunk.choices, chunk.usage = [], counts.usage()
        yield event(msgspec.json.encode(chunk))
    yield event(b"[DONE]")
