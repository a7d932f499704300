"""What an engine core counts, as both sides of the wire know it."""

from __future__ import annotations

from msgspec import Struct

# Upper bounds of the buckets of `EngineStats.step_tokens`; a last one has no bound.
STEP_TOKENS_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


# The same of `Durations`, in seconds.
RESIDENCY_BOUNDS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0),
    *(1200.0, 1800.0),
)


class Durations(Struct, array_like=True, frozen=True):
    """A histogram: `counts[i]` were at most `RESIDENCY_BOUNDS_S[i]` and more than the bound before."""

    counts: list[int]
    sum_s: float


class EngineStats(Struct, array_like=True, frozen=True, kw_only=True):
    """A snapshot. Counters run since start; hits and queries are in tokens, once per request.
    `prefix_cache_copied` is the part of the hits that was copied from the beginning of a block.

    `num_kept_blocks` are kept for a time (`KeepPrefix`), free or not; `kept_blocks_refused` were to be and are not, for
    want of room in a share; `kept_blocks_given_up` are not any more although their time was not over.

    `prefix_cache_misses` counts requests that were not found whole by `MissReason`, `prefix_cache_missed_tokens` the
    tokens of their prompts that were not found; each once, however often it is preempted.

    `resumed_*` count the same for re-admissions after a preemption. `computed_tokens` includes what preempted
    requests compute again. `step_tokens[i]` is the number of steps that computed at most `STEP_TOKENS_BOUNDS[i]` tokens
    and more than the bound before; `computed_tokens` is the sum of their tokens. `block_residency` is empty unless the
    engine watches its blocks; then it has `lifetime`, `idle_before_evict` and `reuse_gap`. `num_waiting_aside` of
    `num_waiting` wait for a picture's inputs, for an adapter's slot or for a prefix that another one computes;
    `prefix_waits` is how often a request began to wait for the latter.

    Of pictures (all 0 where the model takes none): `encoder_cache_queries` and `encoder_cache_hits` are in pictures
    that the prefix cache did not cover, once per request; `encoder_cache_used_bytes` of `encoder_cache_bytes` are
    taken. `feature_inputs_received` and `feature_input_bytes_received` are what frontends sent to be encoded,
    `feature_input_bytes` what of it is held or asked for now.

    `num_adapters` LoRA adapters are loaded, which weigh `adapter_bytes` in host memory. Running requests hold
    `adapter_slots_in_use` of the `adapter_slots` on the device. `adapter_placements` is how often an adapter was put
    into a slot, `adapter_slot_waits` how often a request began to wait for one. `running_adapters` and
    `waiting_adapters` are the names, sorted, by which those that run and those that wait have asked for one.

    `kv_event_batches` were published; `kv_event_batches_dropped`, by reason, were lost for everybody (`queue_full`) or
    found a subscriber that did not read (`subscriber_full`, which counts each time only the first of those it lost).
    """

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_cached_hashes: int
    kv_cache_usage: float
    steps: int
    failed_steps: int
    preemptions: int
    computed_tokens: int
    generated_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    prefix_cache_copied: int
    resumed_queries: int
    resumed_hits: int
    step_tokens: list[int]
    block_residency: dict[str, Durations] = {}
    encoder_cache_queries: int = 0
    encoder_cache_hits: int = 0
    encoder_cache_evictions: int = 0
    encoder_cache_bytes: int = 0
    encoder_cache_used_bytes: int = 0
    encoder_calls: int = 0
    feature_inputs_received: int = 0
    feature_input_bytes_received: int = 0
    feature_input_bytes: int = 0
    prefix_waits: int = 0
    num_waiting_aside: int = 0
    num_kept_blocks: int = 0
    kept_blocks_refused: int = 0
    kept_blocks_given_up: int = 0
    prefix_cache_misses: dict[str, int] = {}
    prefix_cache_missed_tokens: dict[str, int] = {}
    kv_event_batches: int = 0
    kv_event_batches_dropped: dict[str, int] = {}
    num_adapters: int = 0
    adapter_bytes: int = 0
    adapter_slots: int = 0
    adapter_slots_in_use: int = 0
    adapter_placements: int = 0
    adapter_slot_waits: int = 0
    running_adapters: list[str] = []
    waiting_adapters: list[str] = []


class PrefixCacheReset(Struct, array_like=True, frozen=True):
    """What became of a prefix cache that was told to forget everything: no lookup finds anything of it any more.

    `num_dropped_blocks` could be found before. `num_blocks_in_use` of the pool still hold what `num_requests_in_use`
    requests go on with; what those compute behind it is not cached. Of pictures, `num_dropped_features` encoder outputs
    were forgotten; `num_features_in_use` are used by such requests, and can be found until they have ended.
    """

    num_dropped_blocks: int
    num_blocks_in_use: int = 0
    num_requests_in_use: int = 0
    num_dropped_features: int = 0
    num_features_in_use: int = 0
