"""A step's batch over a pool that holds NaN wherever no token of it lies."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kernels.attention_metadata import AttentionMetadata
from kernels.quantize_kv import KVScales, dequantize, quantize

from .reference import reference_attention
from .tensors import fresh, poisoned


@dataclass
class PagedBatch:
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: list[list[int]]
    query_lens: list[int]
    seq_lens: list[int]
    metadata: AttentionMetadata
    scales: KVScales | None = None

    def exact_caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, or what their codes stand for, in float64."""
        if self.scales is None:
            return self.key_cache.double(), self.value_cache.double()
        keys, values = map(dequantize, (self.key_cache, self.value_cache), self.scales, [torch.float64] * 2)
        return keys, values

    def expected(self, **options: Any) -> torch.Tensor:
        """Its attention in float64."""
        visible_to = self.metadata.visible_to
        return reference_attention(
            *(self.query, *self.exact_caches(), self.block_tables, self.query_lens, self.seq_lens),
            visible_to=None if visible_to is None else visible_to.tolist(),
            **options,
        )


def make_batch(
    lengths: Sequence[tuple[int, int]],
    *,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    shared: Sequence[tuple[Sequence[int], int]] = (),
    groups: Sequence[Sequence[tuple[int, int]]] | None = None,
    kept_window: int | None = None,
    planned_seq_len: int | None = None,
) -> PagedBatch:
    """Requests `(query_len, seq_len)` in scattered blocks, all their keys and values in the cache, new ones each time.

    Keys and values are halves of one pool, and queries lie head by head: neither is contiguous. `shared`: requests
    whose tables begin with so many blocks of the first of them. `groups`: each request's positions that see each other.
    `kept_window`: of what a request's first query does not see with this window, nothing is in the cache, and its table
    says 0, a block that is nobody's.
    """
    query_lens, seq_lens = [length for length, _ in lengths], [length for _, length in lengths]
    needed = [math.ceil(seq_len / block_size) for seq_len in seq_lens]
    num_blocks = sum(needed) + 3
    # The last one belongs to nobody.
    free = [block for block in random.sample(range(num_blocks - 1), num_blocks - 1) if block or kept_window is None]
    block_tables = [[free.pop() for _ in range(count)] for count in needed]
    for requests, count in shared:
        for request in requests:
            block_tables[request][:count] = block_tables[requests[0]][:count]
    if kept_window is not None:
        for table, (query_len, seq_len) in zip(block_tables, lengths, strict=True):
            num_unseen = max(0, seq_len - query_len + 1 - kept_window) // block_size
            table[:num_unseen] = [0] * num_unseen

    widest = max(head_dim, value_dim or head_dim)
    pool = poisoned(num_blocks, block_size, num_kv_heads, 2, widest, dtype=dtype)
    key_cache, value_cache = pool[..., 0, :head_dim], pool[..., 1, : value_dim or head_dim]
    for table, seq_len in zip(block_tables, seq_lens, strict=True):
        for place, block in enumerate(table):
            count = min(block_size, seq_len - place * block_size) if block or kept_window is None else 0
            for cache in (key_cache, value_cache):
                cache[block, :count] = fresh(count, num_kv_heads, cache.shape[-1], dtype=dtype)

    visible_to = None
    if groups is not None:
        visible_to = np.array(
            [
                next((end for start, end in own if start <= position < end), position + 1)
                for (query_len, seq_len), own in zip(lengths, groups, strict=True)
                for position in range(seq_len - query_len, seq_len)
            ]
        )
    # What lies behind a table's end is the poisoned block.
    padded = np.full((len(lengths), max(needed, default=0)), num_blocks - 1)
    for row, table in zip(padded, block_tables, strict=True):
        row[: len(table)] = table
    num_tokens = sum(query_lens)
    return PagedBatch(
        query=fresh(num_heads, num_tokens, head_dim, dtype=dtype).transpose(0, 1),
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=block_tables,
        query_lens=query_lens,
        seq_lens=seq_lens,
        metadata=AttentionMetadata(
            query_start_loc=np.concatenate([[0], np.cumsum(query_lens, dtype=np.int64)]),
            seq_lens=np.array(seq_lens, dtype=np.int64),
            block_tables=padded,
            slot_mapping=np.full(num_tokens, -1),
            block_size=block_size,
            dtype=dtype,
            device=torch.device("cpu"),
            visible_to=visible_to,
            planned_seq_len=planned_seq_len,
        ),
    )


def quantized(case: PagedBatch, dtype: torch.dtype) -> PagedBatch:
    """The same with keys and values in 8 bits, halves of one pool as well; scales are NaN where those were."""
    caches = case.key_cache, case.value_cache
    widest = max(cache.shape[-1] for cache in caches)
    pool = torch.zeros(*caches[0].shape[:3], 2, widest, dtype=dtype)
    scales = []
    for place, cache in enumerate(caches):
        codes, their_scales = quantize(cache, dtype)
        pool[..., place, : cache.shape[-1]] = codes
        scales.append(their_scales)
    key_cache, value_cache = (pool[..., place, : cache.shape[-1]] for place, cache in enumerate(caches))
    return replace(case, key_cache=key_cache, value_cache=value_cache, scales=KVScales(*scales))
