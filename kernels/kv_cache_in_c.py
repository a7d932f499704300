"""A layer's cache as C is told of it (`KVCache` of `cpu/attention.h`), and how a step's K/V is written there."""

from __future__ import annotations

import ctypes

import torch

from .quantize_kv import LARGEST, SCALE_DTYPE, KVScales
from .slot_mapping import SlotMapping

# As in cpu/codes.h.
_PLAIN = 0
_CODES = {torch.int8: 1, torch.float8_e4m3fn: 2}


class _CCache(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("slot_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("scales", ctypes.c_void_p),
    )

    @classmethod
    def of(cls, cache: torch.Tensor, scales: torch.Tensor | None) -> _CCache:
        return cls(cache.data_ptr(), *cache.stride()[1:3], None if scales is None else scales.data_ptr())


class CKVCache(ctypes.Structure):
    """`KVCache` of cpu/attention.h."""

    _fields_ = (("keys", _CCache), ("values", _CCache), ("type", ctypes.c_int))

    @classmethod
    def of(cls, key_cache: torch.Tensor, value_cache: torch.Tensor, scales: KVScales | None) -> CKVCache:
        """Of caches that `reaches` says yes to. They are not kept alive."""
        key_scales, value_scales = (None, None) if scales is None else scales
        return cls(
            _CCache.of(key_cache, key_scales),
            _CCache.of(value_cache, value_scales),
            _PLAIN if scales is None else _CODES[key_cache.dtype],
        )


class _CWritten(ctypes.Structure):
    _fields_ = (
        ("cache", CKVCache),
        *((name, ctypes.c_void_p) for name in ("key", "value")),
        *(
            (name, ctypes.c_int64)
            for name in ("key_token_stride", "key_head_stride", "value_token_stride", "value_head_stride")
        ),
        ("slots", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_kv_heads", "key_dim", "value_dim")),
    )


def reaches(key_cache: torch.Tensor, value_cache: torch.Tensor, scales: KVScales | None, dtype: torch.dtype) -> bool:
    """Whether what computes in `dtype` reads and writes such caches."""
    caches = key_cache, value_cache
    if scales is None:
        is_stored = key_cache.dtype is dtype
    else:
        is_stored = key_cache.dtype in LARGEST and all(
            theirs.dtype is SCALE_DTYPE and theirs.shape == cache.shape[:3] and theirs.is_contiguous()
            for theirs, cache in zip(scales, caches, strict=True)
        )
    return is_stored and all(
        cache.is_cpu
        and cache.dtype is key_cache.dtype
        and cache.stride(3) == 1
        and cache.stride(0) == cache.shape[1] * cache.stride(1)
        for cache in caches
    )


def write(
    library: ctypes.CDLL,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: SlotMapping,
    scales: KVScales | None,
) -> None:
    """As `write_kv.write_kv`, for caches that `reaches` says yes to and heads that lie side by side."""
    library.write_kv(
        ctypes.byref(
            _CWritten(
                CKVCache.of(key_cache, value_cache, scales),
                *(key.data_ptr(), value.data_ptr()),
                *(*key.stride()[:2], *value.stride()[:2]),
                slot_mapping.tensor.data_ptr(),
                *(*key.shape, value.shape[2]),
            )
        ),
        torch.get_num_threads(),
    )
