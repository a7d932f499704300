"""Everything an engine core can be told, in one struct. No torch is loaded here."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from ipc.endpoints import check_endpoint, is_tcp
from ipc.kv_events.events import KVEventFormat

HashAlgo = Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]
FullPromptHit = Literal["recompute_last_token", "drop_last_block"]
EvictionPolicy = Literal["lru", "unhashed_first", "frequency"]
PrefixMatchUnit = Literal["token", "block"]
WindowRetention = Literal["all", "prompt_tail"]
SchedulingPolicy = Literal["fcfs", "priority", "prefix"]
Quantization = Literal["int8", "int4"]
KVCacheDtype = Literal["auto", "fp8_e4m3", "int8"]
KVEventHashes = Literal["int", "bytes"]


class KVEventsConfig(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Whether and where an engine tells what its prefix cache gains and loses; names and defaults are vLLM's.

    Args:
        enable_kv_cache_events: record them. `EngineCore.take_kv_events` gives them out.
        publisher: what becomes of them in an engine process: `zmq` publishes them; default that, if there is an
            endpoint. `EngineCore` itself has no sockets.
        endpoint: of the PUB socket, `tcp://` or `ipc://`. Whoever can connect reads token ids and salts.
        replay_endpoint: where consumers ask for what they have missed; always bound.
        buffer_steps: how many batches can be replayed.
        hwm: most batches that wait for one subscriber in the socket; 0 is no limit.
        max_queue_size: most batches that wait to be published; those of further steps are dropped.
        topic: first frame of each message.
        bind: whether the PUB socket is bound or connected; default bound where the endpoint has `*` or `::` or is
            `ipc://`. (Ours.)

    Raises:
        ValueError: a setting is impossible; the message names it.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    endpoint: str | None = None
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    bind: bool | None = None

    def __post_init__(self) -> None:
        for name, least in (("buffer_steps", 0), ("hwm", 0), ("max_queue_size", 1)):
            value = getattr(self, name)
            if not least <= value < 1 << 31:
                raise ValueError(f"kv_events_config.{name}: must be in {least} … {(1 << 31) - 1}, is {value}")
        for name in ("endpoint", "replay_endpoint"):
            if (value := getattr(self, name)) is not None:
                try:
                    check_endpoint(value)
                except ValueError as error:
                    raise ValueError(f"kv_events_config.{name}: {error}") from error

    @property
    def binds(self) -> bool:
        """Whether the PUB socket waits for subscribers, or goes to one that waits."""
        endpoint = self.endpoint or ""
        return self.bind if self.bind is not None else ("*" in endpoint or "::" in endpoint or not is_tcp(endpoint))

    def check_is_published(self) -> None:
        """Raises ValueError where a process would record events that nobody can get."""
        if not self.enable_kv_cache_events:
            return
        if self.publisher == "null":
            raise ValueError("kv_events_config.publisher: null publishes nothing; an engine process needs zmq")
        if self.endpoint is None:
            raise ValueError(
                "kv_events_config.endpoint: say where to publish: ipc:///path or tcp://*:PORT to listen (whoever can"
                " connect reads token ids and salts), or tcp://HOST:PORT to connect to a subscriber"
            )


class LoraModule(Struct, frozen=True, forbid_unknown_fields=True):
    """A LoRA adapter to load at start: a PEFT directory, and how requests ask for it."""

    name: str
    path: str


class EngineConfig(Struct, kw_only=True, frozen=True):
    """Settings of one engine core. `None` means: decide from the model and the machine.

    Args:
        model: a local transformers directory (what `resolve_model` returns).
        model_name: what to call the model in logs and capabilities; default the directory's name.
        dtype: of weights and activations; `auto` is bfloat16 where the device computes in it, else float32.
        device: `auto` is CUDA where there is one, else the CPU.
        max_model_len: most tokens of one request; default what the model was made for.
        block_size: tokens of one KV block.
        num_blocks: size of the KV pool in blocks; overrides the two memory settings.
        disable_hybrid_kv_cache_manager: keep a whole sequence for every layer, also where layers with a sliding window
            could give up what they see no more.
        kv_cache_memory_bytes: memory for the KV pool, all layers together.
        kv_cache_dtype: of keys and values in the KV pool; `auto` is that of activations, the others are 8 bits and a
            scale for each token and head.
        gpu_memory_utilization: share of the device's memory that weights, activations and KV pool may use
            together (CUDA only); ignored when `kv_cache_memory_bytes` is given.
        max_num_seqs: most requests in one step.
        max_num_batched_tokens: token budget of one step, prefill chunks and decodes together.
        enable_chunked_prefill: if false, a prompt is computed in one step or not at all.
        long_prefill_token_threshold: most prefill tokens of one request in one step while others want to
            run; 0 is no limit beyond the budget.
        scheduling_policy: `fcfs`, `priority` (lower first, then by arrival), or `prefix` (of the first in line the one
            with the longest cached prefix; nobody is passed over for long, see `waiting_queue`).
        share_in_flight: a request whose prefix is being computed by another waits for it instead of computing it, too.
        reserve_full_sequence: admit a request only if the pool has room for its whole present sequence, not
            just for its first chunk.
        async_scheduling: schedule and launch the next step while one runs, where nothing but its tokens can differ;
            default where the device computes by itself (CUDA).
        watermark: share of the pool kept free when a request is admitted beside running ones.
        prefix_caching_hash_seed: root of the hash chains in the `_cbor` modes and of the xxhash modes.
        prefix_match_unit: `token` finds the beginning of a block, too, and copies it; `block` whole blocks only.
        window_retention: what layers with a sliding window keep in the cache: all their blocks, or, of a prompt alone,
            those that the longest hit of the same prompt needs (what a peer does by default).
        full_prompt_hit: what to do when every block of a prompt is cached. `drop_last_block` is what peers do.
        kv_cache_metrics: measure how long cached blocks stay and when they are used again (`EngineStats`).
        kv_cache_metrics_sample: share of the blocks that this looks at.
        eviction_policy: which cached blocks go first when others need room: those unused for longest (`lru`); the same,
            but before them all that hold nothing a lookup could find, as a newer peer does (`unhashed_first`); or those
            used seldom and long ago (`frequency`).
        max_kept_share: of the KV pool, how much may be kept at once because requests ask for it (`KeepPrefix`).
        max_kept_share_per_tenant: the same for one tenant.
        num_threads: CPU threads for the model; default the physical cores this process may use.
        fuse_layers: compute a decoder layer of the common kind as a whole, in Foreword's own kernel (CPU only; needs
            `prepack_weights` and `linear_kernel`).
        prepack_weights: store weights in the layout the CPU computes with (CPU only).
        linear_kernel: compute linear layers in prepacked weights with Foreword's own kernels where they were built, not
            with the CPU's matrix library.
        quantization: store and compute the decoder's linear layers with weights in 8 bits (a scale for each output) or
            4 (scale and centre for 32 inputs each; the output head in 8), rounded when the model is loaded. CPU only.
        enforce_eager: launch every kernel of every step, and capture no graphs of decodes (CUDA only).
        cudagraph_capture_sizes: of how many requests decodes are captured; a step is computed as the next larger one.
            Default: sizes up to `max_num_seqs`, close to each other.
        max_num_queued_requests: most sequences that may wait beyond those that free seats (`max_num_seqs`) admit at
            once; further requests are refused as `overloaded`. A request with `n` continuations counts `n`.
        max_num_queued_tokens: the same for their prompt tokens.
        encoder_cache_bytes: memory for what the encoder made of pictures; default room for 16,384 rows, or for as many
            as a step may have.
        max_num_encoder_tokens: most rows that are encoded in one step; default `max_num_batched_tokens`. A single
            picture may be larger.
        max_feature_input_bytes: most bytes of pictures' inputs that are held or asked for; a request that needs more by
            itself gets them when nobody else holds any.
        feature_timeout_s: how long a frontend may take to send the inputs it is asked for; then its request ends.
        kv_events_config: tell what the prefix cache gains and loses; default not.
        kv_events_format: of events on the wire: maps, or arrays as older consumers expect them.
        kv_events_hashes: blocks are called by the last 8 bytes of their hashes, as a number, or by all bytes.
        enable_lora: requests may ask for LoRA adapters.
        max_loras: of how many different adapters a step may have requests; each has a slot on the device.
        max_lora_rank: the largest rank an adapter may have.
        max_cpu_loras: how many adapters may be loaded; all stay in host memory.
        lora_modules: adapters that are loaded at start.
        lora_root: adapters that a frontend asks for must lie below this directory; default: it cannot ask for any.
    """

    model: str = ""
    model_name: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    disable_hybrid_kv_cache_manager: bool = False
    kv_cache_dtype: KVCacheDtype = "auto"
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    scheduling_policy: SchedulingPolicy = "fcfs"
    share_in_flight: bool = True
    reserve_full_sequence: bool = True
    watermark: float = 0.0
    async_scheduling: bool | None = None
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: HashAlgo = "sha256"
    prefix_caching_hash_seed: str | None = None
    prefix_match_unit: PrefixMatchUnit = "token"
    window_retention: WindowRetention = "all"
    full_prompt_hit: FullPromptHit = "recompute_last_token"
    eviction_policy: EvictionPolicy = "lru"
    max_kept_share: float = 0.5
    max_kept_share_per_tenant: float = 0.25
    kv_cache_metrics: bool = False
    kv_cache_metrics_sample: float = 0.01
    num_threads: int | None = None
    fuse_layers: bool = True
    prepack_weights: bool = True
    linear_kernel: bool = True
    quantization: Quantization | None = None
    enforce_eager: bool = False
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    max_num_queued_requests: int | None = None
    max_num_queued_tokens: int | None = None
    encoder_cache_bytes: int | None = None
    max_num_encoder_tokens: int | None = None
    max_feature_input_bytes: int = 1 << 29
    feature_timeout_s: float = 60.0
    kv_events_config: KVEventsConfig | None = None
    kv_events_format: KVEventFormat = "map"
    kv_events_hashes: KVEventHashes = "int"
    enable_lora: bool = False
    max_loras: int = 8
    max_lora_rank: int = 16
    max_cpu_loras: int = 64
    lora_modules: tuple[LoraModule, ...] = ()
    lora_root: str | None = None

    @property
    def records_kv_events(self) -> bool:
        return self.kv_events_config is not None and self.kv_events_config.enable_kv_cache_events
