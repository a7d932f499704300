"""Attention over block tables, a tile of queries and a range of keys at a time. Prefill chunks, decodes, long contexts
cut into parts and prefixes that requests share are one kernel with different tiles: `attention_plan` makes them.

A program takes one tile for one KV head. The tile's rows are its tokens times the heads that share the KV head: what is
read of the cache is read once for them all. For r rows on n keys of b bytes a number that is 2 · head_dim · n · b bytes
and 4 · head_dim · n · r operations: a decode waits for memory and wants few rows and many bytes under way; a prefill
computes and wants many rows. Hence tiles of two sizes (`attention_tiles`), launched one after the other.

A token sees the keys before `position + 1` (or `visible_to`, where some see ahead), and no further back than the
sliding window. Keys no row of the tile sees are not read. Those that every row sees are computed without a mask; at the
diagonal and at the window's end there is one:

        begin ── window's edge ──┬── seen by all ──┬── diagonal ── end

Keys may be divided among several programs. Each leaves the attention of its part and the logarithm of its sum of
weights behind, and `merge_parts` puts them together. A sink is a key with the given score and a value of zero: in a
tile that is whole the sum begins with it, else it is merged.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .attend_keys import LOG2_E, LOWEST, attend_keys
from .attention_metadata import AttentionMetadata
from .attention_tiles import TILE_FIELDS, LayerHeads, launch_options
from .kv_codes import cache_arguments
from .merge_parts import merge_parts
from .quantize_kv import KVScales
from .token_heads import side_by_side
from .triton_language import constant, jit, tl

_NUM_FIELDS = constant(len(TILE_FIELDS))
_LOG2_E = math.log2(math.e)


def tiled_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scales: KVScales | None = None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `paged_attention.paged_attention`, in Triton. `scaling` is positive.

    Raises:
        ValueError: the numbers of a head do not lie side by side in a cache.
    """
    if key_cache.stride(-1) != 1 or value_cache.stride(-1) != 1:
        raise ValueError("attention kernels take caches whose last dimension is contiguous")
    query = side_by_side(query)
    num_tokens, num_heads, head_dim = query.shape
    heads = LayerHeads(
        *(num_heads, key_cache.shape[2], head_dim, value_cache.shape[-1], query.dtype),
        code_dtype=None if scales is None else key_cache.dtype,
    )
    batch, plan = metadata.on_device, metadata.plan(heads, sliding_window)
    output = query.new_empty(num_tokens, num_heads, heads.value_dim)
    parts = output.new_empty(plan.num_parts, num_heads, heads.value_dim, dtype=torch.float32)
    part_logs = output.new_empty(plan.num_parts, num_heads, dtype=torch.float32)
    for tiles, is_wide in ((plan.wide, True), (plan.narrow, False)):
        if len(tiles):
            tiled_attention_kernel[(len(tiles) * heads.num_kv_heads,)](
                *(output, parts, part_logs, query, *cache_arguments(key_cache, value_cache, scales)),
                batch.positions if sinks is None else sinks,
                *(batch.block_tables, batch.positions),
                batch.positions if batch.visible_to is None else batch.visible_to,
                *(tiles, plan.listed_tokens, plan.first_parts),
                *(query.stride(0), query.stride(1), batch.block_tables.stride(0)),
                0 if sliding_window is None else sliding_window,
                (2 / softcap if softcap else 1) * _LOG2_E * scaling,
                (softcap or 0) * _LOG2_E,
                **cache_options(key_cache, value_cache),
                HAS_WINDOW=sliding_window is not None,
                HAS_SOFTCAP=softcap is not None,
                HAS_SINKS=sinks is not None,
                SEES_AHEAD=batch.visible_to is not None,
                **launch_options(heads, is_wide=is_wide),
            )
    merge_parts(output, parts, part_logs, plan.merged, sinks)
    return output


def cache_options(key_cache: torch.Tensor, value_cache: torch.Tensor) -> dict[str, Any]:
    """Constants for caches like these; strides are constants, so that reads are known to be aligned."""
    return {
        f"{name}_{dimension}_STRIDE": cache.stride(axis)
        for name, cache in (("KEY", key_cache), ("VALUE", value_cache))
        for axis, dimension in enumerate(("BLOCK", "SLOT", "HEAD"))
    } | {"BLOCK_SIZE": key_cache.shape[1]}


@jit
def tiled_attention_kernel(  # type: ignore[no-untyped-def]
    output,
    parts,
    part_logs,
    query,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    sinks,
    block_tables,
    positions,
    visible_to,
    tiles,
    listed_tokens,
    first_parts,
    query_token_stride,
    query_head_stride,
    table_stride,
    window,
    scale,
    softcap,
    KEY_BLOCK_STRIDE: tl.constexpr,
    KEY_SLOT_STRIDE: tl.constexpr,
    KEY_HEAD_STRIDE: tl.constexpr,
    VALUE_BLOCK_STRIDE: tl.constexpr,
    VALUE_SLOT_STRIDE: tl.constexpr,
    VALUE_HEAD_STRIDE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SEES_AHEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    EDGE_STAGES: tl.constexpr,
):
    # Neighbouring programs take the heads of one tile, which lie side by side in the cache.
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    tile = tiles + tl.program_id(0) // NUM_KV_HEADS * _NUM_FIELDS
    table_row = tl.load(tile)
    first = tl.load(tile + 1)
    num_tokens = tl.load(tile + 2)
    is_listed = tl.load(tile + 3)
    key_begin = tl.load(tile + 4)
    key_end = tl.load(tile + 5)
    part = tl.load(tile + 6)
    num_parts = tl.load(tile + 7)
    slot = tl.load(tile + 8)
    is_whole = slot < 0

    # Rows beyond the tile's last do again what the last token does, and store nothing.
    rows = tl.arange(0, BLOCK_M)
    is_row = rows < num_tokens * GROUP_SIZE
    heads = kv_head * GROUP_SIZE + rows % GROUP_SIZE
    places = first + tl.maximum(tl.minimum(rows // GROUP_SIZE, num_tokens - 1), 0)
    in_list = (tl.zeros_like(rows) + is_listed) != 0
    tokens = tl.where(in_list, tl.load(listed_tokens + places, mask=in_list, other=0), places)
    own = tl.load(positions + tokens)
    see_to = tl.load(visible_to + tokens) if SEES_AHEAD else own + 1
    see_from = tl.zeros_like(own)
    if HAS_WINDOW:
        see_from = tl.maximum(own - window + 1, 0)

    dims = tl.arange(0, BLOCK_D)
    query_places = tokens.to(tl.int64) * query_token_stride + heads.to(tl.int64) * query_head_stride
    queries = tl.load(query + query_places[:, None] + dims[None, :], mask=(dims < HEAD_DIM)[None, :], other=0.0)

    low = tl.maximum(key_begin, tl.min(see_from, 0))
    high = tl.minimum(key_end, tl.max(see_to, 0))
    keys_per_part = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), num_parts), BLOCK_N) * BLOCK_N
    begin = tl.minimum(low + part * keys_per_part, high)
    end = tl.minimum(begin + keys_per_part, high)

    row_max = tl.full((BLOCK_M,), LOWEST, tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + heads).to(tl.float32) * LOG2_E
        row_max = tl.where(is_whole, sink, row_max)
        row_sum = tl.where(is_whole, 1.0, row_sum)
    accumulator = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)

    table = block_tables + table_row.to(tl.int64) * table_stride
    keys = key_cache + kv_head * KEY_HEAD_STRIDE
    values = value_cache + kv_head * VALUE_HEAD_STRIDE
    # To the window's edge in all rows, what all of them see, and the rest.
    before_window = tl.maximum(tl.max(see_from, 0) - begin, 0)
    full_begin = tl.minimum(begin + tl.cdiv(before_window, BLOCK_N) * BLOCK_N, end)
    seen_by_all = tl.maximum(tl.minimum(tl.min(see_to, 0), end) - full_begin, 0)
    full_end = full_begin + seen_by_all // BLOCK_N * BLOCK_N
    for which in tl.static_range(0 if HAS_WINDOW else 1, 3):
        accumulator, row_max, row_sum = attend_keys(
            accumulator,
            row_max,
            row_sum,
            begin if which == 0 else full_begin if which == 1 else full_end,
            full_begin if which == 0 else full_end if which == 1 else end,
            queries,
            see_from,
            see_to,
            table,
            keys,
            values,
            None if key_scales is None else key_scales + kv_head,
            None if value_scales is None else value_scales + kv_head,
            scale,
            softcap,
            KEY_BLOCK_STRIDE,
            KEY_SLOT_STRIDE,
            VALUE_BLOCK_STRIDE,
            VALUE_SLOT_STRIDE,
            NUM_KV_HEADS,
            BLOCK_SIZE,
            HEAD_DIM,
            VALUE_DIM,
            BLOCK_D,
            BLOCK_DV,
            BLOCK_N,
            HAS_SOFTCAP,
            which != 1,
            NUM_STAGES if which == 1 else EDGE_STAGES,
        )

    # A token of no request, and a part without keys, has a sum of 0.
    has_keys = row_sum > 0.0
    total = tl.where(has_keys, row_sum, 1.0)
    attended = accumulator / total[:, None]
    value_dims = tl.arange(0, BLOCK_DV)
    stored = is_row[:, None] & (value_dims < VALUE_DIM)[None, :]
    if is_whole:
        output_places = (tokens.to(tl.int64) * (NUM_KV_HEADS * GROUP_SIZE) + heads) * VALUE_DIM
        tl.store(output + output_places[:, None] + value_dims[None, :], attended, mask=stored)
    else:
        part_rows = (tl.load(first_parts + tokens) + slot).to(tl.int64) * (NUM_KV_HEADS * GROUP_SIZE) + heads
        logs = tl.where(has_keys, row_max + tl.log2(total), float("-inf"))
        part_places = part_rows[:, None] * VALUE_DIM + value_dims[None, :]
        tl.store(part_logs + part_rows, logs, mask=is_row)
        tl.store(parts + part_places, attended, mask=stored & has_keys[:, None])
