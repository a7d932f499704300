"""How many KV blocks fit: what was asked for, or what leaves the machine usable."""

from __future__ import annotations

import math

import torch

from engine_core.config import EngineConfig
from engine_core.errors import InvalidConfigError

from .host_memory import available_memory_bytes

_CPU_SHARE = 0.25
_CPU_CAP_BYTES = 4 << 30


def choose_num_blocks(
    config: EngineConfig, *, block_bytes: int, max_model_len: int, device: torch.device, activation_bytes: int
) -> int:
    """Blocks of the pool, in this order of precedence: `num_blocks`, `kv_cache_memory_bytes`, and what the device has.

    On CUDA that is `gpu_memory_utilization` of its memory, less what is in use and the `activation_bytes` of a full
    step. On a CPU it is a quarter of the memory available now, at most 4 GiB, and no more than
    `max_num_seqs` requests of `max_model_len` tokens can fill.

    Raises:
        InvalidConfigError: there is no room for a single block.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    if config.kv_cache_memory_bytes is not None:
        budget_bytes, setting = config.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    elif device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        in_use_bytes = total_bytes - free_bytes
        budget_bytes = int(total_bytes * config.gpu_memory_utilization) - in_use_bytes - activation_bytes
        setting = (
            f"gpu_memory_utilization {config.gpu_memory_utilization} of {total_bytes} bytes, {in_use_bytes} of them in"
            f" use and {activation_bytes} needed by a step of max_num_batched_tokens={config.max_num_batched_tokens},"
        )
    else:
        usable_bytes = config.max_num_seqs * math.ceil(max_model_len / config.block_size) * block_bytes
        budget_bytes = min(int(available_memory_bytes() * _CPU_SHARE), _CPU_CAP_BYTES, usable_bytes)
        setting = f"{_CPU_SHARE:.0%} of the available memory"
    num_blocks = budget_bytes // block_bytes
    if num_blocks < 1:
        raise InvalidConfigError(
            f"{setting} leaves {max(0, budget_bytes)} bytes for the KV pool; one block of {config.block_size} tokens"
            f" needs {block_bytes} bytes"
        )
    return num_blocks
