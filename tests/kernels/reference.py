"""Attention over a paged cache as one would write it on a whiteboard: float64, one query and one head at a time."""

from __future__ import annotations

import math

import numpy as np
import torch


def reference_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: list[list[int]],
    query_lens: list[int],
    seq_lens: list[int],
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    visible_to: list[int] | None = None,
) -> torch.Tensor:
    block_size, num_kv_heads = key_cache.shape[1], key_cache.shape[2]
    num_heads = query.shape[1]
    queries = query.double().numpy()
    keys, values = key_cache.double().numpy(), value_cache.double().numpy()
    output = np.zeros((*query.shape[:2], values.shape[-1]))
    row = 0
    for table, query_len, seq_len in zip(block_tables, query_lens, seq_lens, strict=True):
        for position in range(seq_len - query_len, seq_len):
            first = 0 if sliding_window is None else max(0, position + 1 - sliding_window)
            places = [
                (table[p // block_size], p % block_size)
                for p in range(first, position + 1 if visible_to is None else visible_to[row])
            ]
            for head in range(num_heads):
                kv_head = head // (num_heads // num_kv_heads)
                scores = [float(queries[row, head] @ keys[b, o, kv_head]) * scaling for b, o in places]
                if softcap is not None:
                    scores = [math.tanh(s / softcap) * softcap for s in scores]
                sink = -math.inf if sinks is None else float(sinks[head])
                top = max(*scores, sink)
                weights = [math.exp(s - top) for s in scores]
                total = sum(weights) + math.exp(sink - top)
                output[row, head] = sum(
                    w / total * values[b, o, kv_head] for w, (b, o) in zip(weights, places, strict=True)
                )
            row += 1
    return torch.from_numpy(output)
