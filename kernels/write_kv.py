"""Keys and values of a step's tokens, into the paged cache.

    key_cache[slot of token] = key[token]          value_cache[slot of token] = value[token]

A block of the cache is `block_size` slots in a row, so a slot is a row of `[num_slots, num_kv_heads, head_dim]`. A
token whose slot is −1 stores nothing: what it would write is there already (a whole prompt was found), or it is
padding. As an index, −1 is the pool's last slot: whoever forgets the difference overwrites somebody else's block.

Where the caches are quantized, what is stored are codes and a scale for each head (`quantize_kv`).

Every byte is read once and written once, and that is all: 2 · (key and value bytes of a token). A program has some
heads of one token, all of them where that is about a thousand values, and both their keys and their values.
"""

from __future__ import annotations

from typing import Any

import torch

from .cache_heads import write_heads
from .dispatch import library_for, uses_triton
from .kv_cache_in_c import reaches, write
from .kv_codes import cache_arguments
from .quantize_kv import KVScales, quantize
from .slot_mapping import SlotMapping
from .token_heads import heads_per_program, side_by_side
from .triton_language import compile_options, jit, next_power_of_2, tl

# Of keys and of values: 16 bytes of a type of two bytes for each thread of four warps.
_VALUES_PER_PROGRAM = 1024


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: SlotMapping,
    scales: KVScales | None = None,
) -> None:
    """Store `key` and `value` `[num_tokens, num_kv_heads, head_dim]`, each with its own `head_dim`, in tokens' slots.

    Args:
        key_cache, value_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, contiguous. Values are converted to
            their types.
        slot_mapping: a token with slot −1 stores nothing. No slot outside it is touched.
        scales: of quantized caches, whose types are among `quantize_kv.LARGEST`; None for others.
    """
    found = library_for(key)
    lies_side_by_side = key.stride(2) == value.stride(2) == 1 and value.dtype is key.dtype
    if found is not None and lies_side_by_side and reaches(key_cache, value_cache, scales, key.dtype):
        write(found, key, value, key_cache, value_cache, slot_mapping, scales)
        return
    compute = _launch if uses_triton(key) else reference
    compute(key, value, flat_slots(key_cache), flat_slots(value_cache), slot_mapping, flat_scales(scales))


def flat_slots(cache: torch.Tensor) -> torch.Tensor:
    """`[num_slots, num_kv_heads, head_dim]` of a contiguous cache: never a copy, which nobody would read."""
    return cache.view(-1, *cache.shape[2:])


def flat_scales(scales: KVScales | None) -> KVScales | None:
    """`[num_slots, num_kv_heads]` each, likewise."""
    return None if scales is None else KVScales(*map(flat_slots, scales))


def reference(
    key: torch.Tensor,
    value: torch.Tensor,
    key_slots: torch.Tensor,
    value_slots: torch.Tensor,
    slot_mapping: SlotMapping,
    scales: KVScales | None = None,
) -> None:
    """As `write_kv` with caches `[num_slots, num_kv_heads, head_dim]`, in torch."""
    rows, slots = slot_mapping.stored
    if rows is not None:
        key, value = key[rows], value[rows]
    if scales is None:
        _store(key, key_slots, slots)
        _store(value, value_slots, slots)
    else:
        _store_quantized(key, key_slots, scales.keys, slots)
        _store_quantized(value, value_slots, scales.values, slots)


def _store(x: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    cache.index_copy_(0, slots, x if x.dtype == cache.dtype else x.to(cache.dtype))


def _store_quantized(x: torch.Tensor, cache: torch.Tensor, scales: torch.Tensor, slots: torch.Tensor) -> None:
    codes, their_scales = quantize(x, cache.dtype)
    # torch does not index every type of eight bits.
    cache.view(torch.uint8).index_copy_(0, slots, codes.view(torch.uint8))
    scales.index_copy_(0, slots, their_scales)


def launch_options(num_kv_heads: int, key_head_dim: int, value_head_dim: int) -> dict[str, Any]:
    """Constants and compile options."""
    key_width, value_width = next_power_of_2(key_head_dim), next_power_of_2(value_head_dim)
    width = max(key_width, value_width)
    heads = heads_per_program(num_kv_heads, width, _VALUES_PER_PROGRAM)
    return {
        "HEADS": heads,
        "KEY_WIDTH": key_width,
        "VALUE_WIDTH": value_width,
        **compile_options(num_warps=min(4, max(1, heads * width // 256))),
    }


def _launch(
    key: torch.Tensor,
    value: torch.Tensor,
    key_slots: torch.Tensor,
    value_slots: torch.Tensor,
    slot_mapping: SlotMapping,
    scales: KVScales | None,
) -> None:
    num_tokens, num_kv_heads, key_head_dim = key.shape
    value_head_dim = value.shape[-1]
    if not num_tokens:
        return
    key, value = side_by_side(key), side_by_side(value)
    options = launch_options(num_kv_heads, key_head_dim, value_head_dim)
    write_kv_kernel[(num_tokens, -(-num_kv_heads // options["HEADS"]))](
        *cache_arguments(key_slots, value_slots, scales),
        *(key, value, slot_mapping.tensor),
        *(stride for tensor in (key_slots, value_slots, key, value) for stride in tensor.stride()[:2]),
        *(num_kv_heads, key_head_dim, value_head_dim),
        **options,
    )


@jit
def write_kv_kernel(  # type: ignore[no-untyped-def]
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    key,
    value,
    slots,
    key_slot_stride,
    key_slot_head_stride,
    value_slot_stride,
    value_slot_head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    num_kv_heads,
    key_head_dim,
    value_head_dim,
    HEADS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * HEADS
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        write_heads(
            key_cache + slot * key_slot_stride,
            None if key_scales is None else key_scales + slot * num_kv_heads,
            key + token * key_stride,
            key_slot_head_stride,
            key_head_stride,
            first_head,
            num_kv_heads,
            key_head_dim,
            HEADS,
            KEY_WIDTH,
        )
        write_heads(
            value_cache + slot * value_slot_stride,
            None if value_scales is None else value_scales + slot * num_kv_heads,
            value + token * value_stride,
            value_slot_head_stride,
            value_head_stride,
            first_head,
            num_kv_heads,
            value_head_dim,
            HEADS,
            VALUE_WIDTH,
        )
