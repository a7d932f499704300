"""A request inside the engine core: what was asked, how far it is, and nothing that can be derived."""

from __future__ import annotations

import copy
import enum
import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ipc.vocabulary import EngineRequest, ExtraKeySpan, MissReason, RequestTiming, SamplingParams, TokenLogprob

from .feature_layout import FeatureUnit

if TYPE_CHECKING:
    from .kv_cache.block_content import Content
    from .lora.adapter import Adapter


class RequestStatus(enum.IntEnum):
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3


class Request:
    """A sequence being computed.

    `token_ids` holds the prompt followed by everything generated so far. `block_hashes[i]` is the
    identity of its i-th full block, `block_contents[i]` what it holds. KV entries exist for the first
    `num_computed_tokens` tokens. `num_cached_tokens` is the hit of the first admission, and `miss_reason` why it was no
    longer; None before it.

    It is one of the `n` continuations its caller asked for: `index` says which, and `parent` which of them has computed
    its prompt (None for that one). `request_id` is unique in the engine, `output_id` is the caller's.
    `num_kept_tokens` says how much of each of `keep` is kept, once its prompt is computed.
    `prompt_logprobs` collects those of the prompt until they are given out; None where nobody asked.
    `created_s`, `admitted_s` (first admission) and `first_token_s` are on the clock of `time.monotonic`; a continuation
    shares those of the first.
    `features` are the pictures in its prompt, `feature_units` what of them is computed together, and `features_end`
    where the last one ends (0 without any); `inputs` are those its caller had at hand, by key. `adapter` is the LoRA
    adapter it is computed with, whatever has become of its name since; None is the model itself.
    """

    __slots__ = (
        "__weakref__",
        "adapter",
        "admitted_s",
        "arrival_time_s",
        "block_contents",
        "block_hashes",
        "created_s",
        "extra_key_spans",
        "feature_units",
        "features",
        "features_end",
        "first_token_s",
        "index",
        "inputs",
        "keep",
        "max_tokens",
        "miss_reason",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_kept_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "output_id",
        "parent",
        "priority",
        "prompt_logprobs",
        "read_prefix_cache",
        "request_id",
        "sampling_params",
        "seed",
        "status",
        "tenant",
        "token_ids",
        "write_prefix_cache",
    )

    def __init__(
        self,
        source: EngineRequest,
        *,
        max_tokens: int,
        seed: int,
        arrival_time_s: float,
        feature_units: tuple[FeatureUnit, ...] = (),
        adapter: Adapter | None = None,
    ) -> None:
        """`max_tokens`, `seed` and `arrival_time_s` are the source's with their defaults resolved, `adapter` is what it
        names.
        """
        self.request_id: str = source.request_id
        self.output_id: str = source.request_id
        self.index = 0
        self.parent: Request | None = None
        self.token_ids: list[int] = list(source.prompt_token_ids)
        self.num_prompt_tokens: int = len(self.token_ids)
        self.sampling_params: SamplingParams = source.sampling_params
        self.adapter = adapter
        self.extra_key_spans: Sequence[ExtraKeySpan] = source.extra_key_spans
        if adapter is not None:
            self.extra_key_spans = (adapter.span(source.adapter), *source.extra_key_spans)
        self.features = source.mm_features
        self.feature_units = feature_units
        self.features_end = self.features[-1].end if self.features else 0
        self.inputs: Mapping[bytes, Mapping[str, np.ndarray]] = {}
        self.priority: int = source.priority
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        if self.sampling_params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]
        # A token found in the cache has no logits.
        self.read_prefix_cache: bool = source.read_prefix_cache and self.prompt_logprobs is None
        self.write_prefix_cache: bool = source.write_prefix_cache
        self.keep = source.keep
        self.num_kept_tokens: tuple[int, ...] = ()
        self.tenant: str = source.tenant
        self.max_tokens = max_tokens
        self.seed = seed
        self.arrival_time_s = arrival_time_s
        self.block_hashes: list[bytes] = []
        self.block_contents: list[Content] = []
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None
        self.miss_reason: MissReason | None = None
        self.num_preemptions = 0
        self.created_s = time.monotonic()
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None

    def fork(self, index: int) -> Request:
        """Another continuation of the same prompt, with randomness of its own. Nothing of it is computed yet."""
        child = copy.copy(self)
        child.request_id = continuation_id(self.request_id, index)
        child.index = index
        child.parent = self
        child.token_ids = self.token_ids[: self.num_prompt_tokens]
        child.seed = derived_seed(self.seed, index)
        child.block_hashes = self.block_hashes.copy()
        child.block_contents = self.block_contents.copy()
        child.prompt_logprobs = None
        child.status = RequestStatus.WAITING
        child.num_computed_tokens = 0
        child.num_preemptions = 0
        return child

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def adapter_name(self) -> str:
        """What its caller called `adapter`; empty without one."""
        return "" if self.adapter is None else self.extra_key_spans[0].label

    def timing(self, now_s: float) -> RequestTiming:
        """Of a request that has a token."""
        assert self.admitted_s is not None and self.first_token_s is not None
        return RequestTiming(
            queue_s=self.admitted_s - self.created_s,
            prefill_s=self.first_token_s - self.admitted_s,
            decode_s=now_s - self.first_token_s,
            num_preemptions=self.num_preemptions,
        )

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, {self.num_prompt_tokens}+{self.num_output_tokens}"
            f" tokens, {self.num_computed_tokens} computed)"
        )


def continuation_id(output_id: str, index: int) -> str:
    """The `Request.request_id` of a caller's request's continuation."""
    return f"{output_id}\0{index}" if index else output_id


def derived_seed(seed: int, index: int) -> int:
    """The seed of a request's continuation `index`, as far from its siblings' as from a stranger's."""
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
