"""The settings of an engine as options, declared once for every command that starts one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from engine_core import EngineConfig
from engine_core.config import (
    EvictionPolicy,
    FullPromptHit,
    HashAlgo,
    KVCacheDtype,
    KVEventHashes,
    KVEventsConfig,
    PrefixMatchUnit,
    Quantization,
    SchedulingPolicy,
    WindowRetention,
)
from ipc.kv_events import KVEventFormat

from .kv_events import published_kv_events
from .lora_options import lora_module, lora_root
from .options import A_DAY_S, counts, option, size, takes_settings

DType = Literal["auto", "float32", "bfloat16", "float16"]

_ENGINE = EngineConfig()
_MODEL, _MEMORY, _SCHEDULER, _CACHE = "Model", "KV cache memory", "Scheduler", "Prefix cache"
_ADMISSION, _PICTURES, _EVENTS = "Admission", "Pictures in the engine", "KV cache events"
_LORA = "LoRA"


def _engine_options(
    *,
    dtype: Annotated[
        DType,
        option(
            _MODEL,
            "Of weights and activations. auto: bfloat16 where the device computes in it, else float32.",
        ),
    ] = _ENGINE.dtype,
    device: Annotated[str, option(_MODEL, "auto: CUDA where there is one, else the CPU.")] = _ENGINE.device,
    max_model_len: Annotated[
        int | None,
        option(_MODEL, "Most tokens of one request, prompt and output. Default: what the model was made for.", min=2),
    ] = None,
    num_threads: Annotated[
        int | None,
        option(
            _MODEL,
            "CPU threads for the model. Default: the physical cores this process may use, or OMP_NUM_THREADS.",
            min=1,
        ),
    ] = None,
    fuse_layers: Annotated[
        bool, option(_MODEL, "On a CPU, compute a decoder layer of the common kind as a whole.")
    ] = _ENGINE.fuse_layers,
    prepack_weights: Annotated[
        bool, option(_MODEL, "On a CPU, store weights in the layout it computes with.")
    ] = _ENGINE.prepack_weights,
    linear_kernel: Annotated[
        bool,
        option(
            _MODEL,
            "On a CPU, use Foreword's own kernels for prepacked weights where they were built, not oneDNN's.",
        ),
    ] = _ENGINE.linear_kernel,
    quantization: Annotated[
        Quantization | None,
        option(
            _MODEL,
            "On a CPU, compute with weights rounded to 8 or 4 bits: less memory, faster decodes.",
        ),
    ] = None,
    enforce_eager: Annotated[
        bool, option(_MODEL, "On a GPU, capture no CUDA graphs of decodes.", "--enforce-eager")
    ] = _ENGINE.enforce_eager,
    cudagraph_capture_sizes: Annotated[
        str | None,
        option(
            _MODEL,
            "Of how many requests decodes are captured, for instance 1,2,4,8. Default: sizes up to --max-num-seqs.",
            parser=counts,
            metavar="N,N,…",
        ),
    ] = None,
    block_size: Annotated[int, option(_MEMORY, "Tokens of one KV block.", min=1)] = _ENGINE.block_size,
    num_blocks: Annotated[
        int | None,
        option(
            _MEMORY,
            "Size of the KV pool in blocks; goes before the other two.",
            "--num-blocks",
            "--num-gpu-blocks-override",
            min=1,
        ),
    ] = None,
    kv_cache_memory_bytes: Annotated[
        int | None,
        option(_MEMORY, "Memory for the KV pool, for instance 2GiB.", parser=size, metavar="SIZE"),
    ] = None,
    disable_hybrid_kv_cache_manager: Annotated[
        bool,
        option(
            _MEMORY,
            "Keep whole sequences for all layers, also for those with a sliding window.",
            "--disable-hybrid-kv-cache-manager",
        ),
    ] = _ENGINE.disable_hybrid_kv_cache_manager,
    kv_cache_dtype: Annotated[
        KVCacheDtype,
        option(
            _MEMORY,
            "Type of cached keys and values; auto: that of activations. 8 bits take about half of bfloat16's memory.",
        ),
    ] = _ENGINE.kv_cache_dtype,
    gpu_memory_utilization: Annotated[
        float, option(_MEMORY, "Share of the GPU's memory for weights, activations and KV pool.", min=0.01, max=1.0)
    ] = _ENGINE.gpu_memory_utilization,
    max_num_seqs: Annotated[int, option(_SCHEDULER, "Most requests in one step.", min=1)] = _ENGINE.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int, option(_SCHEDULER, "Most tokens in one step, prefill and decode together.", min=1)
    ] = _ENGINE.max_num_batched_tokens,
    enable_chunked_prefill: Annotated[
        bool, option(_SCHEDULER, "Compute long prompts over several steps, beside others.")
    ] = _ENGINE.enable_chunked_prefill,
    long_prefill_token_threshold: Annotated[
        int, option(_SCHEDULER, "Most prefill tokens of one request in a step while others wait; 0: no limit.", min=0)
    ] = _ENGINE.long_prefill_token_threshold,
    scheduling_policy: Annotated[
        SchedulingPolicy,
        option(
            _SCHEDULER,
            "fcfs: first come, first served. priority: lower `priority` first. prefix: of the first in line the one of"
            " which most is cached; the very first is passed over 16 times at most.",
        ),
    ] = _ENGINE.scheduling_policy,
    share_in_flight: Annotated[
        bool, option(_SCHEDULER, "Wait for a prefix that another request is computing, instead of computing it, too.")
    ] = _ENGINE.share_in_flight,
    reserve_full_sequence: Annotated[
        bool, option(_SCHEDULER, "Admit a request only if the pool has room for its whole present sequence.")
    ] = _ENGINE.reserve_full_sequence,
    watermark: Annotated[
        float, option(_SCHEDULER, "Share of the pool kept free at admission.", min=0.0, max=0.99)
    ] = _ENGINE.watermark,
    async_scheduling: Annotated[
        bool | None,
        option(
            _SCHEDULER,
            "Schedule the next step while one runs. Default: on a GPU.",
            "--async-scheduling/--no-async-scheduling",
        ),
    ] = None,
    max_num_queued_requests: Annotated[
        int | None,
        option(
            _ADMISSION,
            "Most requests that may wait while no seat (--max-num-seqs) is free; others get 503. Default: no limit.",
            min=0,
        ),
    ] = None,
    max_num_queued_tokens: Annotated[
        int | None, option(_ADMISSION, "The same for the prompt tokens of those that wait.", min=0)
    ] = None,
    encoder_cache_bytes: Annotated[
        int | None,
        option(
            _PICTURES,
            "Memory for encoded pictures, for instance 1GiB. Default: room for 16,384 tokens of pictures, or"
            " for --max-num-batched-tokens if that is more.",
            parser=size,
            metavar="SIZE",
        ),
    ] = None,
    max_num_encoder_tokens: Annotated[
        int | None,
        option(_PICTURES, "Most tokens of pictures encoded in one step. Default: as --max-num-batched-tokens.", min=1),
    ] = None,
    max_feature_input_bytes: Annotated[
        int,
        option(
            _PICTURES,
            "Memory for prepared pictures that wait to be encoded.",
            parser=size,
            metavar="SIZE",
        ),
    ] = _ENGINE.max_feature_input_bytes,
    feature_timeout_s: Annotated[
        float,
        option(
            _PICTURES,
            "Seconds that a frontend has to send a prepared picture; then its request ends.",
            min=0.1,
            max=A_DAY_S,
        ),
    ] = _ENGINE.feature_timeout_s,
    enable_prefix_caching: Annotated[
        bool, option(_CACHE, "Share the KV cache of equal prefixes between requests.")
    ] = _ENGINE.enable_prefix_caching,
    prefix_caching_hash_algo: Annotated[
        HashAlgo,
        option(_CACHE, "How blocks are identified; the xxhash ones are not collision proof."),
    ] = _ENGINE.prefix_caching_hash_algo,
    prefix_caching_hash_seed: Annotated[
        str | None, option(_CACHE, "Root of the hash chains in the _cbor and xxhash modes.")
    ] = None,
    prefix_match_unit: Annotated[
        PrefixMatchUnit,
        option(_CACHE, "Whether a hit may end inside a block, whose beginning is copied, or ends with a whole one."),
    ] = _ENGINE.prefix_match_unit,
    window_retention: Annotated[
        WindowRetention,
        option(_CACHE, "What layers with a sliding window keep: all blocks, or those a repeated prompt needs."),
    ] = _ENGINE.window_retention,
    full_prompt_hit: Annotated[
        FullPromptHit,
        option(_CACHE, "What to compute again when a whole prompt is cached."),
    ] = _ENGINE.full_prompt_hit,
    eviction_policy: Annotated[
        EvictionPolicy, option(_CACHE, "Which cached blocks that nobody uses go first when others need room.")
    ] = _ENGINE.eviction_policy,
    max_kept_share: Annotated[
        float,
        option(_CACHE, "Share of the KV pool that may be kept because requests ask for it.", min=0.0, max=1.0),
    ] = _ENGINE.max_kept_share,
    max_kept_share_per_tenant: Annotated[
        float, option(_CACHE, "The same for one tenant (a cache salt or API key).", min=0.0, max=1.0)
    ] = _ENGINE.max_kept_share_per_tenant,
    kv_cache_metrics: Annotated[
        bool, option(_CACHE, "Measure how long cached blocks stay, for /metrics.")
    ] = _ENGINE.kv_cache_metrics,
    kv_cache_metrics_sample: Annotated[
        float, option(_CACHE, "Share of the blocks that this looks at.", min=0.0001, max=1.0)
    ] = _ENGINE.kv_cache_metrics_sample,
    kv_events_config: Annotated[
        KVEventsConfig | None,
        option(
            _EVENTS,
            "Publish what the prefix cache gains and loses, for instance"
            """ '{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557", "bind": true}'.""",
            parser=published_kv_events,
            metavar="JSON",
        ),
    ] = None,
    kv_events_format: Annotated[
        KVEventFormat, option(_EVENTS, "Events as maps, or as arrays, which older consumers expect.")
    ] = _ENGINE.kv_events_format,
    kv_events_hashes: Annotated[
        KVEventHashes, option(_EVENTS, "Call blocks by 8 bytes of their hashes, as numbers, or by all bytes.")
    ] = _ENGINE.kv_events_hashes,
    enable_lora: Annotated[
        bool, option(_LORA, "Let requests ask for LoRA adapters, by their names as `model`.", "--enable-lora")
    ] = _ENGINE.enable_lora,
    max_loras: Annotated[int, option(_LORA, "Most different adapters in one step.", min=1)] = _ENGINE.max_loras,
    max_lora_rank: Annotated[int, option(_LORA, "Largest rank of an adapter.", min=1)] = _ENGINE.max_lora_rank,
    max_cpu_loras: Annotated[
        int, option(_LORA, "Most adapters that are loaded; all stay in memory.", min=1)
    ] = _ENGINE.max_cpu_loras,
    lora_modules: Annotated[
        list[Any] | None,
        option(
            _LORA,
            'Adapters to load at start: NAME=PATH, or {"name": NAME, "path": PATH}; a PATH may be a built-in adapter.'
            " Several may follow each other, or repeat the option.",
            parser=lora_module,
            metavar="NAME=PATH",
        ),
    ] = None,
    lora_root: Annotated[
        Path | None,
        option(
            _LORA,
            "Adapters below this directory may be loaded over HTTP (/v1/load_lora_adapter). Default: none.",
            callback=lora_root,
            file_okay=False,
            exists=True,
            metavar="DIR",
        ),
    ] = None,
) -> None:
    """Only its signature is used. Each name is a field of `EngineConfig`."""


# Adds them to a command, which gets their values as the keyword argument `engine_settings`.
takes_engine_options = takes_settings(_engine_options, "engine_settings")
