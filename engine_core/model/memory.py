"""How many KV blocks fit: what was asked for, or what leaves the machine usable."""

from __future__ import annotations

import math

import torch

from engine_core.config import EngineConfig
from engine_core.errors import InvalidConfigError

from .host_memory import available_memory_bytes

_CPU_SHARE = 0.25
_CPU_CAP_BYTES = 4 << 30
# What a CPU computes in hours. Tiny models would otherwise get millions of blocks.
_CPU_CAP_TOKENS = 1 << 20


def choose_num_blocks(
    config: EngineConfig, *, block_bytes: int, num_groups: int, device: torch.device, reserved_bytes: int
) -> int:
    """Blocks of the pool, in this order of precedence: `num_blocks`, `kv_cache_memory_bytes`, and what the device has.

    On CUDA that is `gpu_memory_utilization` of its memory, less what is in use and the `reserved_bytes` that a full
    step, captured decodes and the encoder cache need. On a CPU it is a quarter of the memory available now, at most 4
    GiB and about a million tokens: more than running requests need, because what finished ones leave behind is what
    later ones find.

    Raises:
        InvalidConfigError: there is no room for a block of each of the `num_groups` KV cache groups, or less memory
            than was asked for.
    """
    if config.num_blocks is not None:
        if config.num_blocks < num_groups:
            raise InvalidConfigError(
                f"num_blocks: a token takes a block of each of the model's {num_groups} KV cache groups, the pool would"
                f" have {config.num_blocks}"
            )
        check_room("num_blocks", config.num_blocks * block_bytes, device)
        return config.num_blocks
    if config.kv_cache_memory_bytes is not None:
        budget_bytes, setting = config.kv_cache_memory_bytes, "kv_cache_memory_bytes"
        check_room(setting, budget_bytes, device)
    elif device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        in_use_bytes = total_bytes - free_bytes
        budget_bytes = int(total_bytes * config.gpu_memory_utilization) - in_use_bytes - reserved_bytes
        setting = (
            f"gpu_memory_utilization {config.gpu_memory_utilization} of {total_bytes} bytes, {in_use_bytes} of them in"
            f" use and {reserved_bytes} needed by a step of max_num_batched_tokens={config.max_num_batched_tokens}, by"
            " captured decodes and by the encoder cache,"
        )
    else:
        cap_blocks = math.ceil(_CPU_CAP_TOKENS / config.block_size) * num_groups
        cap_bytes = min(_CPU_CAP_BYTES, cap_blocks * block_bytes)
        budget_bytes = min(int(available_memory_bytes() * _CPU_SHARE), cap_bytes)
        setting = f"{_CPU_SHARE:.0%} of the available memory"
    num_blocks = budget_bytes // block_bytes
    if num_blocks < num_groups:
        of_each_group = f", and there must be one of each of the {num_groups} KV cache groups" if num_groups > 1 else ""
        raise InvalidConfigError(
            f"{setting} leaves {max(0, budget_bytes)} bytes for the KV pool; one block of {config.block_size} tokens"
            f" needs {block_bytes} bytes{of_each_group}"
        )
    return num_blocks


def check_room(setting: str, wanted_bytes: int, device: torch.device) -> None:
    """Raises InvalidConfigError if `wanted_bytes` are more than the device has to give."""
    available_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory_bytes()
    if wanted_bytes > available_bytes:
        raise InvalidConfigError(
            f"{setting}: the KV pool would take {wanted_bytes} bytes, {available_bytes} are available"
        )
