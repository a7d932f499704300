"""Attention in bfloat16 over a paged cache on CPUs with AVX512-BF16: `attention.c`.

It reads keys and values where they lie, whatever their slots, and writes no scores out. Where it was not compiled it is
missing (`is_available`, `compiled.py`).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable

import torch


# As in attention.c.
_PANEL = 32
_MAX_HEAD_DIM = 256
_NO_WINDOW = 1 << 62


class _Attention(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("output", "query", "keys", "values", "key_slots", "key_counts")),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("query_token_stride", "query_head_stride"),
                *("key_slot_stride", "key_head_stride", "value_slot_stride", "value_head_stride"),
                *("num_requests", "num_queries", "num_keys", "num_heads", "num_kv_heads", "head_dim", "value_dim"),
                "window",
            )
        ),
        ("scaling", ctypes.c_float),
        ("query_ends", ctypes.c_void_p),
    )


def is_available() -> bool:
    """Whether the library was built and this CPU computes in it."""
    return _compiled() is not None


def takes(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether `attention` is available and computes with tensors like these."""
    return (
        all(x.dtype is torch.bfloat16 and x.is_cpu and x.stride(-1) == 1 for x in (query, keys, values))
        and all(x.shape[-1] % _PANEL == 0 and x.shape[-1] <= _MAX_HEAD_DIM for x in (keys, values))
        and is_available()
    )


def attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    key_slots: torch.Tensor,
    key_counts: torch.Tensor,
    *,
    scaling: float,
    sliding_window: int | None = None,
    query_ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each request's last tokens over its keys up to their own, or the last `sliding_window` of these.

    Args:
        query: `[num_requests * num_queries, num_heads, head_dim]`.
        keys: `[num_slots, num_kv_heads, head_dim]`; `values` may have another `head_dim`.
        key_slots: `[num_requests, num_keys]` int64, contiguous, where each request's keys are; unchecked.
        key_counts: `[num_requests]` int64, contiguous: the request's own keys, at least `num_queries`; the others of
            its `key_slots` are not read.
        query_ends: `[len(query)]` int64, contiguous: each query sees keys ahead of its own, too, all before this place
            in its request's `key_slots`; never decreasing within a request, at most its `key_counts`; unchecked.

    Sums are in float32, weights are rounded to bfloat16. Returns `[len(query), num_heads, value_head_dim]`. Runs in
    torch's intra-op threads; gradients are not recorded.

    Raises:
        ValueError: `takes` would have said no, or what should be contiguous is not.
    """
    compute = _compiled()
    if compute is None or not takes(query, keys, values):
        raise ValueError("the attention kernel was not built for this CPU or does not take such tensors")
    if not all(x is None or x.is_contiguous() for x in (key_slots, key_counts, query_ends)):
        raise ValueError("the attention kernel takes contiguous slots, counts and ends only")
    num_tokens, num_heads, head_dim = query.shape
    num_requests, num_keys = key_slots.shape
    output = query.new_empty(num_tokens, num_heads, values.shape[-1])
    compute(
        _Attention(
            *(x.data_ptr() for x in (output, query, keys, values, key_slots, key_counts)),
            *query.stride()[:2],
            *keys.stride()[:2],
            *values.stride()[:2],
            *(num_requests, num_tokens // num_requests, num_keys, num_heads, keys.shape[1], head_dim, values.shape[-1]),
            _NO_WINDOW if sliding_window is None else sliding_window,
            scaling,
            None if query_ends is None else query_ends.data_ptr(),
        ),
        torch.get_num_threads(),
    )
    return output


@functools.cache
def _compiled() -> Callable[..., None] | None:
    """`attention_bf16` of `attention.c`, or None where it was not built, does not load or is not for this CPU."""
    spec = importlib.util.find_spec(f"{__package__}._attention")
    if spec is None or spec.origin is None:
        return None
    library = ctypes.CDLL(spec.origin)
    if not library.attention_bf16_is_supported():
        return None
    compute = library.attention_bf16
    compute.argtypes = [ctypes.POINTER(_Attention), ctypes.c_int]
    compute.restype = None
    return compute
