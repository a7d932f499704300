"""A run from its first request to its result."""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from frontend.openai_client import OpenAIClient, RefusedError
from frontend.version import foreword_version

from .meter import Meter, ask
from .results import Parts, Result, Run
from .texts import TextMaker, read_tokenizer
from .workloads import (
    FULL,
    QUICK,
    Scale,
    measure_chats,
    measure_decode,
    measure_prefix,
    measure_shared,
    measure_streams,
    measure_tiny,
    measure_unique,
)

CALIBRATION_WORDS = (40, 360)
# What is said around a text and after it, at most.
_ROOM_TOKENS = 64
# The beginning that a chat template gives to all prompts may be cached.
_COLD_MEANS_AT_MOST_CACHED = 0.3


class Part(NamedTuple):
    """`num_requests` is how many are sent if none fails."""

    measure: Callable[[Meter, TextMaker, Scale], Awaitable[Any]]
    num_requests: Callable[[Scale], int]
    meaning: str


# Named after the fields of `Parts`, in the order in which they run.
PARTS = {
    "prefix": Part(
        measure_prefix, lambda s: 3 * s.repeats * len(s.prefix_sizes), "time to first token of cold and warm prompts"
    ),
    "decode": Part(measure_decode, lambda s: s.repeats * len(s.decode_contexts), "speed of a single stream"),
    "streams": Part(measure_streams, lambda s: s.repeats * s.num_streams, "speed of several streams at once"),
    "chats": Part(measure_chats, lambda s: s.num_chats * s.num_turns, "several chats of several turns"),
    "shared": Part(measure_shared, lambda s: s.num_requests, "requests that share a system prompt"),
    "unique": Part(measure_unique, lambda s: s.num_requests, "requests that share nothing"),
    "tiny": Part(measure_tiny, lambda s: 2 * s.num_tiny, "what the smallest request costs"),
}


class Watcher(Protocol):
    """Is told how a run goes on."""

    def part_begins(self, name: str, num_requests: int) -> None: ...

    def request_ended(self) -> None: ...

    def part_ended(self, name: str, elapsed_s: float, num_failed: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """A server that answers, and what to ask it. `result` is filled as parts end."""

    result: Result
    client: OpenAIClient
    fields: dict[str, Any]
    texts: TextMaker
    scale: Scale
    timeout_s: float


async def prepare(
    client: OpenAIClient,
    *,
    model: str | None,
    seed: int,
    quick: bool,
    tokenizer: Path | None,
    timeout_s: float,
    scale: Scale | None = None,
) -> Prepared:
    """Learn what the server can do, and warm it up.

    Raises:
        ServerError: it does not even answer two words.
        ValueError: there is no `tokenizer`.
    """
    counts_with = read_tokenizer(tokenizer) if tokenizer is not None else None
    card = await client.find_model(model)
    fields: dict[str, Any] = {"model": card.id, "ignore_eos": True}
    try:
        await _ask(client, fields, "Say yes.", timeout_s)
    except RefusedError as error:
        if error.status not in (400, 422):
            raise
        del fields["ignore_eos"]
        await _ask(client, fields, "Say yes.", timeout_s)
    texts = TextMaker(seed, tokenizer=counts_with)
    measured = None if counts_with else await _measure_tokens_per_word(client, fields, texts, timeout_s)
    if measured is not None:
        texts = TextMaker(seed, tokens_per_word=measured)
    run = Run(
        url=client.url,
        model=card.id,
        seed=seed,
        quick=quick,
        started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        foreword_version=foreword_version(),
        tokenizer=str(tokenizer) if tokenizer is not None else None,
        tokens_per_word=measured,
        ignore_eos="ignore_eos" in fields,
    )
    result = Result(run, Parts(), {}, [], complete=False)
    if counts_with is None and measured is None:
        result.notes.append("the server does not count tokens: sizes of prompts are guesses")
    if not run.ignore_eos:
        result.notes.append("the server does not take ignore_eos: answers may be shorter than asked for")
    fitting = _fitting(scale or (QUICK if quick else FULL), card.max_model_len, result.notes)
    return Prepared(result, client, fields, texts, fitting, timeout_s)


async def run_parts(prepared: Prepared, names: list[str], watcher: Watcher) -> None:
    """Run the parts called `names`, one after the other. Stops early, `complete` unset, if the server is gone."""
    result = prepared.result
    for name in names:
        part = PARTS[name]
        meter = Meter(prepared.client, prepared.fields, timeout_s=prepared.timeout_s, on_request=watcher.request_ended)
        watcher.part_begins(name, part.num_requests(prepared.scale))
        started_s = time.perf_counter()
        setattr(result.parts, name, await part.measure(meter, prepared.texts, prepared.scale))
        watcher.part_ended(name, time.perf_counter() - started_s, meter.failures.total())
        if meter.failures:
            result.failures[name] = dict(meter.failures)
        if meter.gave_up:
            result.notes.append(f"given up during {name}: the server does not answer any more")
            return
    result.notes += _doubts(result.parts)
    result.complete = True


async def _ask(client: OpenAIClient, fields: dict[str, Any], text: str, timeout_s: float) -> int | None:
    """How many tokens the prompt with `text` has, if the server tells."""
    body = fields | {"messages": [{"role": "user", "content": text}], "max_tokens": 1, "temperature": 0}
    answer = await ask(client, body, timeout_s=timeout_s, stream=True)
    return answer.usage.prompt_tokens if answer.usage else None


async def _measure_tokens_per_word(
    client: OpenAIClient, fields: dict[str, Any], texts: TextMaker, timeout_s: float
) -> float | None:
    few, many = CALIBRATION_WORDS
    try:
        few_tokens, many_tokens = [
            await _ask(client, fields, texts.words(f"calibration/{count}", count), timeout_s) for count in (few, many)
        ]
    except RefusedError:
        return None
    if few_tokens is None or many_tokens is None or many_tokens <= few_tokens:
        return None
    return (many_tokens - few_tokens) / (many - few)


def _fitting(scale: Scale, max_model_len: int | None, notes: list[str]) -> Scale:
    """`scale` without the sizes that the model has no room for."""
    if max_model_len is None:
        return scale
    room = max_model_len - _ROOM_TOKENS
    sizes = tuple(size for size in scale.prefix_sizes if size <= room)
    contexts = tuple(size for size in scale.decode_contexts if size + scale.decode_tokens <= room)
    if left_out := sorted({*scale.prefix_sizes, *scale.decode_contexts} - {*sizes, *contexts}):
        notes.append(f"left out, since the server takes {max_model_len} tokens: {', '.join(map(str, left_out))}")
    return dataclasses.replace(scale, prefix_sizes=sizes, decode_contexts=contexts)


def _doubts(parts: Parts) -> list[str]:
    """What makes the figures mean something else than they seem to."""
    doubts: list[str] = []
    rows = parts.prefix or []
    warm_already = [row for row in rows if _mostly_cached(row.cold_cached_tokens, row.prompt_tokens)]
    if warm_already:
        sizes = ", ".join(str(row.target_tokens) for row in warm_already)
        doubts.append(f"cold prompts were cached already ({sizes} tokens): take another --seed")
    if parts.unique is not None and (parts.unique.cached_share or 0) > _COLD_MEANS_AT_MOST_CACHED:
        share = parts.unique.cached_share or 0
        doubts.append(f"{share:.0%} of the unique prompts was cached already: take another --seed")
    if any(row.prompt_tokens is not None and row.warm_cached_tokens is None for row in rows):
        doubts.append("the server does not tell how many prompt tokens were cached")
    return doubts


def _mostly_cached(cached_tokens: float | None, prompt_tokens: float | None) -> bool:
    return (cached_tokens or 0) > _COLD_MEANS_AT_MOST_CACHED * (prompt_tokens or 0)
