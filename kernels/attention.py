"""Attention over a paged cache on CPUs: `cpu/attention.c`, in bfloat16 and float32.

It reads keys and values where they lie, by block table, and writes no scores out. Where it was not compiled it is
missing (`is_available`, `compiled.py`).
"""

from __future__ import annotations

import ctypes

import torch

from .attention_batch import AttentionBatch, CAttentionBatch
from .compiled import library
from .kv_cache_in_c import CKVCache, reaches
from .quantize_kv import KVScales

# As in cpu/attention.h.
MAX_HEAD_DIM = 512


class CAttention(ctypes.Structure):
    """`Attention` of cpu/attention.h."""

    _fields_ = (
        ("batch", ctypes.POINTER(CAttentionBatch)),
        ("query", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("query_token_stride", "query_head_stride")),
        ("cache", CKVCache),
        ("output", ctypes.c_void_p),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("sinks", ctypes.c_void_p),
    )


def is_available(dtype: torch.dtype) -> bool:
    """Whether there is a library for this CPU that computes in `dtype`."""
    return library(dtype) is not None


def takes(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, scales: KVScales | None = None
) -> bool:
    """Whether `attention` is available and computes with tensors like these."""
    return (
        query.is_cpu
        and query.stride(-1) == 1
        and all(x.shape[-1] <= MAX_HEAD_DIM for x in (query, key_cache, value_cache))
        and reaches(key_cache, value_cache, scales, query.dtype)
        and is_available(query.dtype)
    )


def attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: AttentionBatch,
    scales: KVScales | None = None,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """What `paged_attention.paged_attention` says, for a step and window that `batch` was planned for.

    Sums and softmax are in float32; in bfloat16, weights are rounded before they meet the values. What a token gets
    depends on which others are in the step only by the order in which it is added up. Runs in torch's intra-op threads;
    gradients are not recorded.

    Raises:
        ValueError: `takes` would have said no, or the step was planned for other tensors.
    """
    if not takes(query, key_cache, value_cache, scales):
        raise ValueError("the attention kernel was not built for this CPU or does not take such tensors")
    heads, planned = batch.heads, batch.on_c_side
    if (*query.shape, *key_cache.shape[1:], value_cache.shape[-1]) != (
        *(planned.num_tokens, heads.num_heads, heads.head_dim, planned.block_size, heads.num_kv_heads),
        *(heads.head_dim, heads.value_dim),
    ) or query.dtype is not heads.dtype:
        raise ValueError(
            f"the step was planned for {planned.num_tokens} tokens in blocks of {planned.block_size} and {heads}, got"
            f" queries {list(query.shape)}, keys {list(key_cache.shape)} and values {list(value_cache.shape)}"
        )
    output = query.new_empty(*query.shape[:2], heads.value_dim)
    if sinks is not None:
        sinks = sinks.float().contiguous()
    found = library(heads.dtype)
    assert found is not None
    found.attention(
        ctypes.byref(
            CAttention(
                ctypes.pointer(planned),
                query.data_ptr(),
                *query.stride()[:2],
                CKVCache.of(key_cache, value_cache, scales),
                output.data_ptr(),
                scaling,
                softcap or 0.0,
                None if sinks is None else sinks.data_ptr(),
            )
        ),
        torch.get_num_threads(),
    )
    return output
