"""What a run found, as structs whose fields are the JSON's. Times are in seconds; null could not be measured."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from .statistics import Spread


class Run(Struct):
    """What was run: enough to run it again.

    `ignore_eos`: whether the server takes that extension; if not, answers may be shorter than asked for.
    """

    url: str
    model: str
    seed: int
    quick: bool
    started_at: str
    foreword_version: str
    tokenizer: str | None
    tokens_per_word: float | None
    ignore_eos: bool


class PrefixRow(Struct):
    """Texts of one size: asked about for the first time (cold), then twice more with other questions (warm)."""

    target_tokens: int
    prompt_tokens: float | None
    cold_cached_tokens: float | None
    warm_cached_tokens: float | None
    cold_ttft_s: float | None
    warm_ttft_s: float | None
    warm_over_cold: float | None


class DecodeRow(Struct):
    """Streams that begin together. `tokens_per_s` is that of all of them, from the first token of any to the last
    of any; `prompt_tokens` and `output_tokens` are those of one.
    """

    num_streams: int
    target_context_tokens: int
    prompt_tokens: float | None
    output_tokens: float | None
    tokens_per_s: float | None


class Load(Struct):
    """Many requests, of which `num_requests` were answered.

    `cached_share` is of the prompt tokens of requests whose cached tokens are known; `inter_token` the times between
    events of a stream, which are tokens unless the server puts several into one.
    """

    description: str
    num_requests: int
    wall_s: float
    requests_per_s: float
    output_tokens_per_s: float | None
    prompt_tokens: int | None
    output_tokens: int | None
    cached_share: float | None
    ttft: Spread | None
    inter_token: Spread | None
    request: Spread | None


class Chats(Struct):
    load: Load
    ttft_median_by_turn_s: list[float | None]
    cached_share_after_first_turn: float | None


class Tiny(Struct):
    """Whole requests of one token, one after the other."""

    prompt_tokens: float | None
    plain: Spread | None
    stream: Spread | None


class Parts(Struct):
    """Null is a part that was not asked for, or not reached."""

    prefix: list[PrefixRow] | None = None
    decode: list[DecodeRow] | None = None
    streams: DecodeRow | None = None
    chats: Chats | None = None
    shared: Load | None = None
    unique: Load | None = None
    tiny: Tiny | None = None


class Result(Struct):
    """`failures` has, per part, how many requests ended with which error. `complete`: all parts were run to the end."""

    run: Run
    parts: Parts
    failures: dict[str, dict[str, int]]
    notes: list[str]
    complete: bool
    format: Literal["foreword-bench-1"] = "foreword-bench-1"
