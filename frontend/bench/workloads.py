"""What is measured: one function per part. Each gets texts of its own, so that no part warms another's prompts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from frontend.openai_client import Answer

from .meter import Messages, Meter
from .results import Chats, DecodeRow, Load, PrefixRow, Tiny
from .statistics import median, ratio, spread, total
from .texts import TextMaker

# What a chat template and a question add to a text, roughly.
FRAME_TOKENS = 24
_FIRST_QUESTION = "Which of these things would you take on a journey?"
_OTHER_QUESTIONS = ("What stands at the end of this text?", "Is there a color in this text?")
_BRIEF = "You are assistant number {} of a library. Keep your answers short."


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is asked. Sizes are in tokens."""

    prefix_sizes: tuple[int, ...] = (256, 1024, 2048, 4096)
    decode_contexts: tuple[int, ...] = (32, 2048)
    decode_tokens: int = 128
    num_streams: int = 8
    streams_context: int = 32
    repeats: int = 3
    num_chats: int = 8
    num_turns: int = 6
    first_message_tokens: int = 160
    message_tokens: int = 48
    answer_tokens: int = 48
    num_requests: int = 32
    concurrency: int = 8
    shared_tokens: int = 1024
    own_tokens: int = 32
    shared_answer_tokens: int = 32
    unique_tokens: int = 256
    unique_answer_tokens: int = 64
    num_tiny: int = 50


FULL = Scale()
QUICK = Scale(
    prefix_sizes=(256, 1024),
    decode_contexts=(32,),
    repeats=1,
    num_chats=2,
    num_turns=3,
    num_requests=8,
    num_tiny=10,
)


async def measure_prefix(meter: Meter, texts: TextMaker, scale: Scale) -> list[PrefixRow]:
    """Time to first token of prompts never seen, and of others that begin like them."""
    rows: list[PrefixRow] = []
    for size in scale.prefix_sizes:
        cold: list[Answer] = []
        warm: list[Answer] = []
        for repeat in range(scale.repeats):
            text = texts.text(f"prefix/{size}/{repeat}", size - FRAME_TOKENS)
            for question in (_FIRST_QUESTION, *_OTHER_QUESTIONS):
                if (answer := await meter.ask(_user(f"{text}\n\n{question}"), 2)) is not None:
                    (cold if question == _FIRST_QUESTION else warm).append(answer)
        cold_s, warm_s = (median([answer.ttft_s for answer in answers]) for answers in (cold, warm))
        rows.append(
            PrefixRow(
                size,
                prompt_tokens=median(_prompt_tokens(cold + warm)),
                cold_cached_tokens=median(_cached_tokens(cold)),
                warm_cached_tokens=median(_cached_tokens(warm)),
                cold_ttft_s=cold_s,
                warm_ttft_s=warm_s,
                warm_over_cold=ratio(warm_s, cold_s),
            )
        )
    return rows


async def measure_decode(meter: Meter, texts: TextMaker, scale: Scale) -> list[DecodeRow]:
    """Tokens per second of a single stream, after little and after much context."""
    return [await _decode(meter, texts, scale, context, num_streams=1) for context in scale.decode_contexts]


async def measure_streams(meter: Meter, texts: TextMaker, scale: Scale) -> DecodeRow:
    """Tokens per second of several streams together, after so little context that its computation hardly counts."""
    return await _decode(meter, texts, scale, scale.streams_context, scale.num_streams)


async def _decode(meter: Meter, texts: TextMaker, scale: Scale, context: int, num_streams: int) -> DecodeRow:
    rounds: list[list[Answer]] = []
    for repeat in range(scale.repeats):
        jobs = []
        for stream in range(num_streams):
            text = texts.text(f"decode/{num_streams}/{context}/{repeat}/{stream}", max(1, context - FRAME_TOKENS))
            jobs.append((_user(f"{text}\n\nGo on with this story, and take your time."), scale.decode_tokens))
        answers, _ = await meter.ask_all(jobs, concurrency=num_streams)
        rounds.append(answers)
    all_answers = [answer for answers in rounds for answer in answers]
    return DecodeRow(
        num_streams,
        context,
        prompt_tokens=median(_prompt_tokens(all_answers)),
        output_tokens=median(_output_tokens(all_answers)),
        tokens_per_s=median([_tokens_per_s(answers) for answers in rounds if len(answers) == num_streams]),
    )


def _tokens_per_s(answers: Sequence[Answer]) -> float | None:
    """Of answers to requests sent at one time. None if there is nothing after the first tokens, or no count of it."""
    num_tokens = _output_tokens(answers)
    arrivals_s = [arrival_s for answer in answers for arrival_s in answer.arrivals_s]
    if None in num_tokens or len(arrivals_s) <= len(answers):
        return None
    return ratio((total(num_tokens) or 0) - len(answers), max(arrivals_s) - min(arrivals_s))


async def measure_chats(meter: Meter, texts: TextMaker, scale: Scale) -> Chats:
    """Several chats at once, each turn sent when the one before is answered, with all that was said before."""
    by_turn: list[list[Answer]] = [[] for _ in range(scale.num_turns)]

    async def chat(number: int) -> None:
        messages = [{"role": "system", "content": _BRIEF.format(number)}]
        for turn, answers in enumerate(by_turn):
            size = scale.message_tokens if turn else scale.first_message_tokens
            messages += _user(texts.text(f"chats/{number}/{turn}", size))
            # The list is sent while it is, and added to only afterwards.
            answer = await meter.ask(messages, scale.answer_tokens)
            if answer is None:
                return
            answers.append(answer)
            messages.append({"role": "assistant", "content": answer.text})

    started_s = time.perf_counter()
    await asyncio.gather(*(chat(number) for number in range(scale.num_chats)))
    wall_s = time.perf_counter() - started_s
    later = [answer for answers in by_turn[1:] for answer in answers]
    return Chats(
        _load(f"{scale.num_chats} chats of {scale.num_turns} turns", [*by_turn[0], *later], wall_s),
        ttft_median_by_turn_s=[median([answer.ttft_s for answer in answers]) for answers in by_turn],
        cached_share_after_first_turn=_cached_share(later),
    )


async def measure_shared(meter: Meter, texts: TextMaker, scale: Scale) -> Load:
    """Requests that share a long system prompt."""
    system = {"role": "system", "content": texts.text("shared", scale.shared_tokens)}
    jobs = [
        ([system, *_user(texts.text(f"shared/{i}", scale.own_tokens))], scale.shared_answer_tokens)
        for i in range(scale.num_requests)
    ]
    return _load(
        f"{scale.num_requests} requests, {scale.shared_tokens} tokens shared + {scale.own_tokens} own,"
        f" {scale.shared_answer_tokens} generated, {scale.concurrency} at once",
        *await meter.ask_all(jobs, concurrency=scale.concurrency),
    )


async def measure_unique(meter: Meter, texts: TextMaker, scale: Scale) -> Load:
    """Requests that share nothing."""
    jobs = [
        (_user(texts.text(f"unique/{i}", scale.unique_tokens - FRAME_TOKENS)), scale.unique_answer_tokens)
        for i in range(scale.num_requests)
    ]
    return _load(
        f"{scale.num_requests} requests, {scale.unique_tokens} tokens, {scale.unique_answer_tokens} generated,"
        f" {scale.concurrency} at once",
        *await meter.ask_all(jobs, concurrency=scale.concurrency),
    )


async def measure_tiny(meter: Meter, texts: TextMaker, scale: Scale) -> Tiny:
    """What a request costs that computes next to nothing."""
    answers: dict[bool, list[Answer]] = {False: [], True: []}
    for stream, answered in answers.items():
        for i in range(scale.num_tiny):
            answer = await meter.ask(_user(texts.text(f"tiny/{stream}/{i}", 8)), 1, stream=stream)
            if answer is not None:
                answered.append(answer)
    return Tiny(
        prompt_tokens=median(_prompt_tokens(answers[False] + answers[True])),
        plain=spread([answer.total_s for answer in answers[False]]),
        stream=spread([answer.total_s for answer in answers[True]]),
    )


def _user(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def _load(description: str, answers: Sequence[Answer], wall_s: float) -> Load:
    output_tokens = total(_output_tokens(answers))
    gaps_s = [
        later_s - earlier_s
        for answer in answers
        for earlier_s, later_s in zip(answer.arrivals_s, answer.arrivals_s[1:])
    ]
    return Load(
        description,
        num_requests=len(answers),
        wall_s=wall_s,
        requests_per_s=len(answers) / wall_s,
        output_tokens_per_s=ratio(output_tokens, wall_s),
        prompt_tokens=total(_prompt_tokens(answers)),
        output_tokens=output_tokens,
        cached_share=_cached_share(answers),
        ttft=spread([answer.ttft_s for answer in answers if answer.ttft_s is not None]),
        inter_token=spread(gaps_s),
        request=spread([answer.total_s for answer in answers]),
    )


def _cached_share(answers: Sequence[Answer]) -> float | None:
    known = [answer.usage for answer in answers if answer.usage and answer.usage.cached_tokens is not None]
    return ratio(sum(usage.cached_tokens or 0 for usage in known), sum(usage.prompt_tokens for usage in known))


def _prompt_tokens(answers: Sequence[Answer]) -> list[int | None]:
    return [answer.usage.prompt_tokens if answer.usage else None for answer in answers]


def _output_tokens(answers: Sequence[Answer]) -> list[int | None]:
    return [answer.usage.completion_tokens if answer.usage else None for answer in answers]


def _cached_tokens(answers: Sequence[Answer]) -> list[int | None]:
    return [answer.usage.cached_tokens if answer.usage else None for answer in answers]
