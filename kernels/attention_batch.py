"""A step's attention on CPUs, planned once for all layers with such heads and window: `cpu/attention_plan.c`.

Which requests share a prefix is found out here (`shared_prefixes`), everything else there.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch

from .attention_tiles import LayerHeads
from .compiled import PANEL, library
from .shared_prefixes import ReadingCosts, SharedPrefix, are_shared, shared_prefixes

NO_WINDOW = 1 << 62

# As in cpu/attention.h.
_TASK_FIELDS = 11
_MAX_ROWS = 144
_PART_FLOATS_BESIDE_SUMS = 16
# What is read of memory while tasks for a prefix are handed out and their parts put together.
_OVERHEAD_BYTES = 1 << 17

_INPUTS = ("query_start_loc", "seq_lens", "block_tables", "visible_to", "prefix_of", "prefix_lens")
_SIZES = (
    *("num_requests", "num_tokens", "num_prefixes", "table_stride", "block_size", "window"),
    *("num_heads", "num_kv_heads", "head_dim", "value_dim", "num_threads"),
)
_PER_TOKEN = ("first_seen", "end_seen", "own_parts", "prefix_parts", "part_counts", "listed", "merged")
_RESULTS = ("num_listed", "num_merged", "num_parts", "work")


class CAttentionBatch(ctypes.Structure):
    """`AttentionBatch` of cpu/attention.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _INPUTS),
        *((name, ctypes.c_int64) for name in _SIZES),
        ("tasks", ctypes.c_void_p),
        ("max_tasks", ctypes.c_int64),
        ("num_tasks", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in _PER_TOKEN),
        *((name, ctypes.c_int64) for name in _RESULTS),
        ("parts", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """A plan. `on_c_side` is what kernels are given; it lives as long as this. `prefixes` are read once for several."""

    heads: LayerHeads
    on_c_side: CAttentionBatch
    prefixes: list[SharedPrefix]
    arrays: tuple[np.ndarray | torch.Tensor | None, ...]

    def in_tables(self, block_tables: np.ndarray) -> AttentionBatch | None:
        """This plan for keys and values that lie in other blocks; None where these are not shared alike.

        Both have one memory for parts: they are not computed at the same time.
        """
        if not are_shared(self.prefixes, block_tables, self.on_c_side.block_size):
            return None
        tables = np.ascontiguousarray(block_tables, dtype=np.int64)
        on_c_side = CAttentionBatch.from_buffer_copy(self.on_c_side)
        on_c_side.block_tables, on_c_side.table_stride = tables.ctypes.data, tables.shape[1]
        return AttentionBatch(self.heads, on_c_side, self.prefixes, (*self.arrays, tables))


def plan_batch(
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    block_tables: np.ndarray,
    block_size: int,
    heads: LayerHeads,
    *,
    sliding_window: int | None = None,
    visible_to: np.ndarray | None = None,
    num_threads: int,
) -> AttentionBatch:
    """The arrays are those of `AttentionMetadata`. `num_threads` are to be kept busy; any number may compute it.

    Raises:
        RuntimeError: there is no library for `heads.dtype`.
    """
    found = library(heads.dtype)
    if found is None:
        raise RuntimeError(f"there is no attention kernel for {heads.dtype} on this CPU")
    num_requests, num_tokens = len(seq_lens), int(query_start_loc[-1])
    prefixes = _prefixes(query_start_loc, seq_lens, block_tables, block_size, heads, sliding_window)
    prefix_of = prefix_lens = None
    if prefixes:
        prefix_of, prefix_lens = np.full(num_requests, -1), np.array([prefix.num_tokens for prefix in prefixes])
        for index, prefix in enumerate(prefixes):
            prefix_of[prefix.requests] = index
    inputs = tuple(
        None if array is None else np.ascontiguousarray(array, dtype=np.int64)
        for array in (query_start_loc, seq_lens, block_tables, visible_to, prefix_of, prefix_lens)
    )
    per_token = np.empty((len(_PER_TOKEN), num_tokens), dtype=np.int64)
    batch = CAttentionBatch(
        *(None if array is None else array.ctypes.data for array in inputs),
        *(num_requests, num_tokens, len(prefixes), block_tables.shape[1], block_size),
        NO_WINDOW if sliding_window is None else sliding_window,
        *(heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.value_dim, num_threads),
        *(None, 0, 0),
        *range(per_token.ctypes.data, per_token.ctypes.data + per_token.nbytes, 8 * num_tokens),
    )
    needed = 32 + 16 * num_threads + num_requests
    while batch.max_tasks < needed:
        tasks = np.empty((needed, _TASK_FIELDS), dtype=np.int64)
        batch.tasks, batch.max_tasks = tasks.ctypes.data, needed
        needed = found.plan_attention(ctypes.byref(batch))
    parts = None
    if batch.num_parts:
        part_floats = -(-heads.value_dim // PANEL) * PANEL + _PART_FLOATS_BESIDE_SUMS
        parts = torch.empty(batch.num_parts * heads.num_heads * part_floats)
        batch.parts = parts.data_ptr()
    return AttentionBatch(heads, batch, prefixes, (*inputs, per_token, tasks, parts))


def _prefixes(
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    block_tables: np.ndarray,
    block_size: int,
    heads: LayerHeads,
    sliding_window: int | None,
) -> list[SharedPrefix]:
    """Those that requests read together."""
    if len(seq_lens) < 2:
        return []
    task_tokens = max(1, _MAX_ROWS // heads.group_size)
    query_lens = np.diff(query_start_loc)
    return shared_prefixes(
        *(block_tables, seq_lens, query_lens, block_size),
        costs=ReadingCosts(
            kv_bytes=heads.kv_bytes,
            # A part for the prefix and one for the rest, in float32, written and read.
            part_bytes=2 * 2 * heads.num_heads * (heads.value_dim + _PART_FLOATS_BESIDE_SUMS) * 4,
            tile_queries=task_tokens,
            overhead_bytes=_OVERHEAD_BYTES,
        ),
        num_tiles=-(-query_lens // task_tokens),
        sliding_window=sliding_window,
    )
