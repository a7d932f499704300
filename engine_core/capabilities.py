"""What a caller may ask of an engine: its settings and its model's limits, as far as pool and steps hold them."""

from __future__ import annotations

import logging

from ipc.vocabulary import EngineCapabilities

from .config import EngineConfig
from .errors import InvalidConfigError
from .kv_cache.groups import longest_sequence, most_blocks
from .runner import ModelInfo

logger = logging.getLogger(__name__)


def engine_capabilities(config: EngineConfig, info: ModelInfo) -> EngineCapabilities:
    """Raises InvalidConfigError if no request can run at all."""
    max_model_len = _usable_model_len(config, info)
    return EngineCapabilities(
        model=info.name,
        max_model_len=max_model_len,
        vocab_size=info.vocab_size,
        block_size=config.block_size,
        num_blocks=info.num_blocks,
        hash_algo=config.prefix_caching_hash_algo,
        cache_namespace=info.cache_namespace,
        cache_config=_cache_config(config) | _cache_size(config, info, max_model_len),
        tokenizer_digest=info.tokenizer_digest,
        is_limited_by_pool=_longest_in_pool(config, info, max_model_len + 1) == max_model_len,
        max_loras=info.num_adapter_slots if config.enable_lora else 0,
    )


def _cache_config(config: EngineConfig) -> dict[str, str]:
    """The KV cache's settings, under the names that the metrics of peers give them, and what its contents come from."""
    return {
        "block_size": str(config.block_size),
        "cache_dtype": config.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        "enable_prefix_caching": str(config.enable_prefix_caching),
        "gpu_memory_utilization": str(config.gpu_memory_utilization),
        "hash_block_size": str(config.block_size),
        "kv_cache_memory_bytes": str(config.kv_cache_memory_bytes),
        "num_gpu_blocks_override": str(config.num_blocks),
        "prefix_caching_hash_algo": config.prefix_caching_hash_algo,
        "quantization": str(config.quantization),
    }


def _cache_size(config: EngineConfig, info: ModelInfo, max_model_len: int) -> dict[str, str]:
    """How many of the longest requests find room at once, and their tokens, under the same kind of names."""
    most = most_blocks(info.windows, max_model_len, config.block_size, config.max_num_batched_tokens)
    return {
        "kv_cache_max_concurrency": f"{info.num_blocks / most:.2f}",
        "kv_cache_size_tokens": str(info.num_blocks * max_model_len // most),
    }


def _longest_in_pool(config: EngineConfig, info: ModelInfo, limit_tokens: int) -> int:
    return longest_sequence(
        info.windows, info.num_blocks, config.block_size, config.max_num_batched_tokens, limit_tokens=limit_tokens
    )


def _usable_model_len(config: EngineConfig, info: ModelInfo) -> int:
    """Most tokens of one request: what was asked for or the model's context, as far as pool and step can hold it.

    Raises:
        InvalidConfigError: that is not even one token of prompt and one of output.
    """
    wanted = config.max_model_len or info.max_model_len
    pool_tokens = _longest_in_pool(config, info, wanted)
    step_tokens = wanted if config.enable_chunked_prefill else config.max_num_batched_tokens
    usable = min(wanted, pool_tokens, step_tokens)
    if usable < 2:
        raise InvalidConfigError(
            f"max_model_len: at most {usable} tokens per request (wanted {wanted}, the KV pool of {info.num_blocks}"
            f" blocks holds {pool_tokens}, a step {step_tokens}); a prompt and its first output need 2"
        )
    if usable < wanted:
        logger.warning(
            "max_model_len_capped wanted=%d usable=%d pool_tokens=%d step_tokens=%d",
            wanted,
            usable,
            pool_tokens,
            step_tokens,
        )
    return usable
