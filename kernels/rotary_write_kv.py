"""`rotary` and `write_kv` at once: keys are turned on their way into the cache, queries into a tensor of their own.

What it saves is the rotated keys, written by the one and read by the other, and a launch. Attention reads keys from the
cache only, so nobody misses them. A token with slot −1 stores nothing, but its query is turned: it is what such a token
is computed for.

Bytes moved per token: queries, keys and values in and out, and once its angles. A program has some heads of one token:
of its queries, or both of its keys and of its values.
"""

from __future__ import annotations

from typing import Any

import torch

from . import rotary, write_kv
from .cache_heads import rotate_and_write_heads, write_heads
from .dispatch import uses_triton
from .kv_codes import cache_arguments
from .quantize_kv import KVScales
from .slot_mapping import SlotMapping
from .token_heads import rotate_heads, side_by_side
from .triton_language import jit, next_power_of_2, tl


def rotary_write_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: SlotMapping,
    scales: KVScales | None = None,
    *,
    interleaved: bool = False,
) -> torch.Tensor:
    """Store `key`, rotated, and `value` in the tokens' slots; returns `query`, rotated, as a new tensor.

    The arguments are those of `rotary.rotary` and `write_kv.write_kv`. No argument but the caches is written to.
    """
    output = query.new_empty(query.shape)
    compute = _launch if uses_triton(query) else reference
    key_slots, value_slots = write_kv.flat_slots(key_cache), write_kv.flat_slots(value_cache)
    flat_scales = write_kv.flat_scales(scales)
    compute(output, query, key, value, cos, sin, key_slots, value_slots, slot_mapping, flat_scales, interleaved)
    return output


def reference(
    output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_slots: torch.Tensor,
    value_slots: torch.Tensor,
    slot_mapping: SlotMapping,
    scales: KVScales | None,
    interleaved: bool,
) -> None:
    """As `rotary_write_kv` with caches `[num_slots, num_kv_heads, head_dim]`, in torch, into `output`."""
    rotated_key = torch.empty_like(key)
    rotary.reference(output, rotated_key, query, key, cos, sin, interleaved)
    write_kv.reference(rotated_key, value, key_slots, value_slots, slot_mapping, scales)


def launch_options(num_heads: int, head_dim: int, num_pairs: int, value_head_dim: int) -> dict[str, Any]:
    """Constants and compile options for so many heads of queries."""
    return {
        **rotary.launch_options(num_heads, head_dim, num_pairs),
        "VALUE_WIDTH": next_power_of_2(value_head_dim),
    }


def _launch(
    output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_slots: torch.Tensor,
    value_slots: torch.Tensor,
    slot_mapping: SlotMapping,
    scales: KVScales | None,
    interleaved: bool,
) -> None:
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, num_pairs, value_head_dim = key.shape[1], cos.shape[1], value.shape[2]
    if not num_tokens:
        return
    query, key, value = side_by_side(query), side_by_side(key), side_by_side(value)
    options = launch_options(num_heads, head_dim, num_pairs, value_head_dim)
    num_parts = sum(-(-heads // options["HEADS"]) for heads in (num_heads, num_kv_heads))
    rotary_write_kv_kernel[(num_tokens, num_parts)](
        *(output, *cache_arguments(key_slots, value_slots, scales)),
        *(query, key, value, cos, sin, slot_mapping.tensor),
        *(stride for x in (output, key_slots, value_slots, query, key, value) for stride in x.stride()[:2]),
        *(*cos.stride(), *sin.stride()),
        *(num_heads, num_kv_heads, num_pairs, head_dim - 2 * num_pairs, value_head_dim),
        INTERLEAVED=interleaved,
        **options,
    )


@jit
def rotary_write_kv_kernel(  # type: ignore[no-untyped-def]
    output,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    query,
    key,
    value,
    cos,
    sin,
    slots,
    output_stride,
    output_head_stride,
    key_slot_stride,
    key_slot_head_stride,
    value_slot_stride,
    value_slot_head_stride,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    cos_stride,
    cos_pair_stride,
    sin_stride,
    sin_pair_stride,
    num_heads,
    num_kv_heads,
    num_pairs,
    num_left,
    value_head_dim,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    LEFT: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    num_query_parts = tl.cdiv(num_heads, HEADS)
    cos += token * cos_stride
    sin += token * sin_stride
    if part < num_query_parts:
        rotate_heads(
            output + token * output_stride,
            query + token * query_stride,
            cos,
            sin,
            output_head_stride,
            query_head_stride,
            cos_pair_stride,
            sin_pair_stride,
            part * HEADS,
            num_heads,
            num_pairs,
            num_left,
            INTERLEAVED,
            HEADS,
            PAIRS,
            LEFT,
        )
    else:
        first_head = (part - num_query_parts) * HEADS
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            rotate_and_write_heads(
                key_cache + slot * key_slot_stride,
                None if key_scales is None else key_scales + slot * num_kv_heads,
                key + token * key_stride,
                cos,
                sin,
                key_slot_head_stride,
                key_head_stride,
                cos_pair_stride,
                sin_pair_stride,
                first_head,
                num_kv_heads,
                num_pairs,
                num_left,
                INTERLEAVED,
                HEADS,
                PAIRS,
                LEFT,
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
