"""A request inside the engine core: what was asked, how far it is, and nothing that can be derived."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from ipc.messages import EngineRequest, ExtraKeySpan, SamplingParams


class RequestStatus(enum.IntEnum):
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3


class Request:
    """A sequence being computed.

    `token_ids` holds the prompt followed by everything generated so far. `block_hashes[i]` is the
    identity of its i-th full block. KV entries exist for the first `num_computed_tokens` tokens.
    `num_cached_tokens` is the hit of the first admission, None before it.
    """

    __slots__ = (
        "arrival_time_s",
        "block_hashes",
        "extra_key_spans",
        "max_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "priority",
        "read_prefix_cache",
        "request_id",
        "sampling_params",
        "seed",
        "status",
        "token_ids",
    )

    def __init__(self, source: EngineRequest, *, max_tokens: int, seed: int, arrival_time_s: float) -> None:
        """`max_tokens`, `seed` and `arrival_time_s` are the source's with their defaults resolved."""
        self.request_id: str = source.request_id
        self.token_ids: list[int] = list(source.prompt_token_ids)
        self.num_prompt_tokens: int = len(self.token_ids)
        self.sampling_params: SamplingParams = source.sampling_params
        self.extra_key_spans: Sequence[ExtraKeySpan] = source.extra_key_spans
        self.priority: int = source.priority
        self.read_prefix_cache: bool = source.read_prefix_cache
        self.max_tokens = max_tokens
        self.seed = seed
        self.arrival_time_s = arrival_time_s
        self.block_hashes: list[bytes] = []
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None
        self.num_preemptions = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, {self.num_prompt_tokens}+{self.num_output_tokens}"
            f" tokens, {self.num_computed_tokens} computed)"
        )
