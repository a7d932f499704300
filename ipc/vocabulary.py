"""What a caller asks of an engine and what it answers: the words of the embedding API, and of what processes say.

All are msgspec structs encoded as MessagePack arrays: a value costs itself, not its field's name. Fields are only ever
appended, with a default, so that neighbouring versions can read each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

FinishReason = Literal["stop", "length", "abort", "error"]

# Of `EngineRequest.keep`, and of each of its `KeepPrefix`.
MAX_KEPT_PREFIXES = 4
MAX_KEPT_TTL_S = 86_400
MAX_KEPT_PRIORITY = 100

# msgspec refuses the union of two string-like types, though MessagePack tells them apart.
if TYPE_CHECKING:
    SpanKey = str | bytes
else:
    SpanKey = Any


class ExtraKeySpan(Struct, array_like=True, frozen=True):
    """Something besides tokens that decides what is in the KV cache at positions `[start, end)`.

    Every block that overlaps the span mixes `(kind, key, start and end relative to the block)` into its
    hash. `end=None` means "to the end, generated tokens included". Kinds are domain-separated: a
    `cache_salt` spelled like an image hash is still a salt. `label` names the key for people and for peers'
    tagged keys (a LoRA adapter's name); it never enters a hash of Foreword's own.
    """

    start: int
    end: int | None
    kind: str
    key: SpanKey
    label: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.key, str | bytes):
            raise TypeError(f"ExtraKeySpan.key must be str or bytes, not {type(self.key).__name__}")


class MultimodalFeature(Struct, array_like=True, frozen=True):
    """A picture in a prompt: which tokens it fills, and what the engine must know of it before it has its pixels.

    Its placeholder tokens are at `[start, start + num_tokens)`, the first and the last of them embedded.
    `embed_ranges`, relative to `start`, half open, ascending, are those that the encoder's rows replace, in order; what
    lies between them is ordinary tokens (row breaks, tile names). `key` is equal exactly where the encoder's output may
    be shared: same content, same processor options, same tenant. `layout` has the numbers that positions depend on, by
    the name of the model's argument (`image_grid_thw`: (1, 16, 16)). `num_input_bytes` is what its inputs
    (`SupplyFeature`) weigh. What the KV cache must know of it says an `ExtraKeySpan` of the kind `mm`.
    """

    key: bytes
    start: int
    num_tokens: int
    embed_ranges: tuple[tuple[int, int], ...]
    num_input_bytes: int
    layout: dict[str, tuple[int, ...]] = {}
    modality: str = "image"

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def num_embeds(self) -> int:
        """Rows that the encoder makes of it."""
        return sum(end - start for start, end in self.embed_ranges)


class SamplingParams(Struct, array_like=True, frozen=True):
    """How a request's tokens are chosen and when it ends.

    `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off. `seed=None` draws one at admission; with
    a seed the outcome depends on nothing but the request itself, never on what else is in the batch.
    `max_tokens=None` means: until the model's context is full. A generated token in `stop_token_ids` ends
    the request and is part of its output; so does the model's end-of-sequence unless `ignore_eos`.

    Before temperature: `logit_bias` is added; then come `repetition_penalty`, which looks at prompt and output, and
    `frequency_penalty` and `presence_penalty`, which look at the output. Impossible are tokens outside
    `allowed_token_ids`, tokens that would complete one of `bad_words_token_ids` (begun in the prompt or not), and, for
    the first `min_tokens`, those that end the request; where that leaves none, `allowed_token_ids` alone hold. After
    temperature: `min_p`, the least probability relative to the most likely token's; then `top_k` and `top_p`.

    `logprobs=k` reports each generated token's log-probability, before anything above, and the k most likely tokens';
    `prompt_logprobs=k` the same for the prompt, which is then computed afresh (its blocks are still written to
    the cache). `n` continuations are drawn; the prompt is computed once.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1

    @property
    def has_penalties(self) -> bool:
        """Whether each token changes what the tokens after it are drawn from."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def looks_at_last_token(self) -> bool:
        """Whether a token can be drawn, beyond the model's own part, only when those before it are known."""
        return self.has_penalties or any(len(word) > 1 for word in self.bad_words_token_ids)


class KeepPrefix(Struct, array_like=True, frozen=True):
    """Keep what is cached of a prompt's first `num_tokens` tokens for `ttl_s` seconds after each time it is used.

    Where a tenant's room for kept prefixes is short, those of lower `priority` are given up first.
    """

    num_tokens: int
    ttl_s: float
    priority: int = 0


class EngineRequest(Struct, array_like=True, frozen=True):
    """One sequence to continue. `request_id` is unique among its sender's unfinished requests.

    Lower `priority` runs first (only under the priority policy). `arrival_time_s` orders equals;
    None means now. `read_prefix_cache=False` computes the whole prompt afresh; its blocks are still
    written to the cache, unless `write_prefix_cache` is false: then nobody finds anything of it. `mm_features` are its
    pictures by position, none over another; their inputs follow when the engine asks for them.

    `keep`, at most `MAX_KEPT_PREFIXES`, are to stay in the cache from when the prompt is computed; they count to the
    share of `tenant`, which is no part of any identity (`extra_key_spans` are).

    `adapter` is the name of a LoRA adapter that the engine has loaded; the one that bears it when the request is
    prepared computes it to its end, and its digest is the extra key of all its tokens. Empty is the model itself.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams = SamplingParams()
    extra_key_spans: tuple[ExtraKeySpan, ...] = ()
    priority: int = 0
    arrival_time_s: float | None = None
    read_prefix_cache: bool = True
    mm_features: tuple[MultimodalFeature, ...] = ()
    write_prefix_cache: bool = True
    keep: tuple[KeepPrefix, ...] = ()
    tenant: str = ""
    adapter: str = ""


class AdapterInfo(Struct, array_like=True, frozen=True):
    """A LoRA adapter that an engine has loaded, under the name by which requests ask for it.

    `digest` is the SHA-256 (hex) of its tensors and scaling: equal exactly where KV blocks may be shared, whatever the
    name. `path` is where it was read, `base_model` what it says it was trained on. `rank` is its largest;
    `target_modules` are the last parts of its modules' names, sorted. With `targets_encoder` pictures are encoded
    otherwise than without it. `num_bytes` is what its weights weigh in host memory; `loaded_s` is on the wall clock.
    """

    name: str
    digest: str
    path: str
    rank: int
    target_modules: tuple[str, ...]
    targets_encoder: bool
    num_bytes: int
    loaded_s: float
    base_model: str = ""


# Why a prompt was not found whole in the prefix cache:
#   none            it was: nothing but what has to be computed anyway was computed
#   continued       all that was cached of its relatives was used; it goes on where they ended
#   diverged        a cached relative goes on differently
#   not_found       nothing that begins like it is cached, or was lately (of less than a block that is not remembered)
#   evicted         what comes next was cached, and has given way to something else
#   reset           what comes next was cached, and the cache was reset
#   block_boundary  more of it is cached, but only whole blocks are found (`prefix_match_unit`)
#   read_disabled   it was told not to read the cache, or asks for its prompt's log-probabilities
#   cache_disabled  there is no prefix cache
MissReason = Literal[
    "none",
    "continued",
    "diverged",
    "not_found",
    "evicted",
    "reset",
    "block_boundary",
    "read_disabled",
    "cache_disabled",
]


class CacheReport(Struct, array_like=True, frozen=True):
    """What the prefix cache did for a request: why it did no more when the request was first admitted, and how many
    tokens of each of its `keep` are kept (fewer than asked for where a share is used up).
    """

    miss_reason: MissReason
    num_kept_tokens: tuple[int, ...] = ()


class CacheExplanation(Struct, array_like=True, frozen=True):
    """Where what is cached and a request part: `token_index` is the first token of the request that was lost, or that
    its longest cached relative has not.

    `relative_token_ids` are how the relative goes on from there, none where it ends or is not known;
    `differing_kind` is the kind of the extra key that sets them apart, where the tokens do not. `lost_since_s`: when
    what comes next was evicted or reset, on the wall clock.
    """

    token_index: int
    relative_token_ids: list[int] = []
    differing_kind: str | None = None
    lost_since_s: float | None = None


class CacheProbe(Struct, array_like=True, frozen=True):
    """What a request would find in a prefix cache now: `num_hit_tokens` of its prompt, `num_copied_tokens` of them
    copied from the beginning of a block; so many of the first of them as `num_kept_tokens` are kept for a time.
    `tier_tokens` says where all of them are.
    """

    num_hit_tokens: int
    num_copied_tokens: int
    num_kept_tokens: int
    tier_tokens: dict[str, int]
    miss_reason: MissReason
    explanation: CacheExplanation | None = None


class RequestError(Struct, array_like=True, frozen=True):
    """Why a request ended without a result.

    `invalid`: the caller's fault; `param` names the offending field of `EngineRequest` (`mm_features[0]`, if it is one
    picture) or `SamplingParams`. `overloaded`: try again later, or elsewhere; `reason` then is a word programs can
    test (`max_num_queued_reqs`, `max_num_queued_tokens`, `draining`), if there is one, and `retry_after_s` how much
    later. `internal`: ours.
    """

    code: Literal["invalid", "overloaded", "internal"]
    message: str
    param: str | None = None
    reason: str | None = None
    retry_after_s: float | None = None


# There may be hundreds of thousands, and they hold no cycles: the garbage collector need not walk them.
class TokenLogprob(Struct, array_like=True, frozen=True, gc=False):
    """A token's log-probability and rank (1 is the most likely), and the most likely tokens with theirs."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class RequestTiming(Struct, array_like=True, frozen=True):
    """How long a request waited to be admitted, computed its prompt (until its first token), and went on from there.

    `num_preemptions` are those of the continuation whose output this comes with.
    """

    queue_s: float
    prefill_s: float
    decode_s: float
    num_preemptions: int


class RequestOutput(Struct, array_like=True):
    """What one step added to one continuation of a request; `index` says which of its `n`.

    `num_cached_tokens` is the prefix-cache hit of its first admission and never changes afterwards.
    `stop_reason` is the token that ended the request when it was one of its `stop_token_ids`. `logprobs` has an entry
    per new token, `prompt_logprobs` one per prompt token (None for the first, which nothing predicts) in the first
    output, where they were asked for. In an output with a `finish_reason`, `num_unfinished` tells how many of the
    request's other continuations are still to end; an `error` ends them all. `timing` comes with the request's first
    token and with the last one of each continuation, `cache` with the request's first token.
    """

    request_id: str
    new_token_ids: list[int]
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: RequestError | None = None
    index: int = 0
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_unfinished: int = 0
    timing: RequestTiming | None = None
    cache: CacheReport | None = None

    @property
    def ends_request(self) -> bool:
        """Whether no further output of the request follows."""
        return self.finish_reason is not None and self.num_unfinished == 0

    def absorb(self, later: RequestOutput) -> None:
        """Become this output and the one after it, of the same continuation, in one. `later` is given up."""
        self.new_token_ids += later.new_token_ids
        self.finish_reason, self.stop_reason, self.error = later.finish_reason, later.stop_reason, later.error
        self.num_unfinished = later.num_unfinished
        self.timing = later.timing or self.timing
        self.cache = self.cache or later.cache
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        if self.logprobs is not None and later.logprobs is not None:
            self.logprobs += later.logprobs


class EngineCapabilities(Struct, array_like=True, frozen=True):
    """What a frontend must know of an engine before it sends the first request.

    `max_model_len` is the most tokens (prompt and output) one request may have here: the smaller of the
    model's context and the KV pool, which it is with `is_limited_by_pool`. `cache_namespace` is equal exactly where KV
    blocks may be shared.
    `cache_config` has the KV cache's settings by name, for people.
    `tokenizer_digest` is equal where the tokenizer's files are; empty where there are none. A step may have requests of
    `max_loras` different LoRA adapters; 0 where there can be none.
    """

    model: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    hash_algo: str
    cache_namespace: str
    cache_config: dict[str, str] = {}
    tokenizer_digest: str = ""
    is_limited_by_pool: bool = False
    max_loras: int = 0


class WantedFeature(Struct, array_like=True, frozen=True):
    """The feature `key` of the request `request_id`, whose inputs the engine needs."""

    request_id: str
    key: bytes
