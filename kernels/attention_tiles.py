"""What a tile of attention is: how many rows and keys a program takes at a time, and what is said of it in a table.

Rows are tokens times the heads that share a KV head (`tiled_attention` says why). There are two sizes:

- *narrow*: 16 rows, the fewest a tensor core takes. A decode reads far more than it computes, so several loads are kept
  under way (`num_stages`), and two programs share a multiprocessor.
- *wide*: as many rows as registers hold beside their sums, for prefill and for a prefix that many requests share. A
  program reads 2 · head_dim · keys values to compute rows · 4 · head_dim · keys operations, so 128 rows need a quarter
  of the bandwidth of L2 that 32 would.

No shape spills registers on compute capability 8.0 or 9.0 (`tests/kernels/ahead_of_time.py`). Products in float32 are
made without tensor cores, with operands in registers, so their tiles are smaller.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from .quantize_kv import SCALE_DTYPE
from .triton_language import compile_options, next_power_of_2

# What a row of the table of tiles says, in this order:
# the row of `block_tables` its keys are found by; its first token, in the batch or, where `is_listed`, in the list of
# tokens; how many tokens it has; keys `[key_begin, key_end)` it looks at, as far as its tokens see them; which of
# `num_parts` equal shares of these is this tile's; and where its result goes: −1 is the output, else a place behind the
# first of its token's parts.
TILE_FIELDS = ("table_row", "first", "num_tokens", "is_listed", "key_begin", "key_end", "part", "num_parts", "slot")


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """The heads of a layer; `num_heads` is a multiple of `num_kv_heads`, and `dtype` that of queries and cache.

    A quantized cache has codes of `code_dtype` instead (`quantize_kv`).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    code_dtype: torch.dtype | None = None

    @property
    def group_size(self) -> int:
        """How many heads share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        if self.code_dtype is None:
            return self.num_kv_heads * (self.head_dim + self.value_dim) * self.dtype.itemsize
        codes = (self.head_dim + self.value_dim) * self.code_dtype.itemsize
        return self.num_kv_heads * (codes + 2 * SCALE_DTYPE.itemsize)


@dataclass(frozen=True, slots=True)
class TileShape:
    """`num_stages` iterations are under way at once where nothing is masked, `edge_stages` where something is.

    `keys` are those of an iteration; `programs_per_sm` is how many a multiprocessor has room for.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    edge_stages: int
    programs_per_sm: int


def tile_shape(heads: LayerHeads, *, is_wide: bool) -> TileShape:
    """The shape for these heads; its rows are at least one token's, so there is no narrow one for very large groups."""
    widest = next_power_of_2(max(heads.head_dim, heads.value_dim, 16))
    is_wide = is_wide or heads.group_size > 16
    if heads.dtype.itemsize > 2:
        shape = _shape_of_wide_types(widest, is_wide)
        if heads.code_dtype is not None:
            # What is loaded ahead would become float32, in registers, before it is wanted.
            num_warps = 4 if widest > 128 and not is_wide else shape.num_warps
            shape = replace(shape, num_warps=num_warps, num_stages=1, edge_stages=1)
    elif heads.code_dtype is not None and widest > 64:
        shape = _shape_of_codes(widest, is_wide)
    # Of the stages of loads the first are those of block table entries, which keys and values wait for.
    elif not is_wide:
        shape = TileShape(16, 64, 4, 5, 1, 2) if widest <= 128 else TileShape(16, 32, 8, 5, 5, 2)
    elif widest <= 64:
        shape = TileShape(128, 64, 4, 3, 3, 2)
    elif widest <= 128:
        shape = TileShape(128, 64, 8, 3, 1, 1)
    else:
        shape = TileShape(64, 32, 8, 3, 3, 1)
    return replace(shape, rows=max(shape.rows, next_power_of_2(heads.group_size)))


def _shape_of_codes(widest: int, is_wide: bool) -> TileShape:
    """Fewer keys at a time: registers hold them twice, as codes and as numbers."""
    if widest <= 128:
        return TileShape(128, 32, 8, 3, 1, 1) if is_wide else TileShape(16, 32, 4, 5, 1, 3)
    return TileShape(64, 16, 8, 3, 1, 1) if is_wide else TileShape(16, 32, 8, 5, 5, 1)


def _shape_of_wide_types(widest: int, is_wide: bool) -> TileShape:
    if is_wide:
        return TileShape(32, 16, 8, 2, 2, 1)
    if widest <= 64:
        return TileShape(16, 32, 4, 2, 2, 1)
    return TileShape(16, 32 if widest <= 128 else 16, 8, 2, 2, 1)


def launch_options(heads: LayerHeads, *, is_wide: bool) -> dict[str, Any]:
    """Constants and compile options of `tiled_attention_kernel` for these heads, but for the cache's strides."""
    shape = tile_shape(heads, is_wide=is_wide)
    return {
        "NUM_KV_HEADS": heads.num_kv_heads,
        "GROUP_SIZE": heads.group_size,
        "HEAD_DIM": heads.head_dim,
        "VALUE_DIM": heads.value_dim,
        "BLOCK_D": next_power_of_2(max(16, heads.head_dim)),
        "BLOCK_DV": next_power_of_2(max(16, heads.value_dim)),
        "BLOCK_M": shape.rows,
        "BLOCK_N": shape.keys,
        "NUM_STAGES": shape.num_stages,
        "EDGE_STAGES": shape.edge_stages,
        **compile_options(shape.num_warps, shape.num_stages),
    }
