"""Decoder layers and a step of theirs as C is told of them: `Layer` and `LayerStep` of `cpu/layer.h`."""

from __future__ import annotations

import ctypes

import torch

from .attention import CAttention
from .attention_batch import CAttentionBatch
from .layer_parts import LINEAR_NAMES, NORM_NAMES, LayerParts, Norm
from .linear import CWeight
from .lora_in_c import CLoraBatch

_SIZES = ("num_heads", "num_kv_heads", "head_dim", "rotary_dim")


class _CNorm(ctypes.Structure):
    _fields_ = (("weight", ctypes.c_void_p), ("size", ctypes.c_int64), ("epsilon", ctypes.c_float))

    @classmethod
    def of(cls, norm: Norm | None) -> _CNorm:
        return cls() if norm is None else cls(norm.weight.data_ptr(), len(norm.weight), norm.epsilon)


class CLayer(ctypes.Structure):
    _fields_ = (
        *((name, _CNorm) for name in NORM_NAMES),
        *((name, CWeight) for name in LINEAR_NAMES),
        *((name, ctypes.c_int64) for name in _SIZES),
        ("activation", ctypes.c_int),
        ("attention", CAttention),
        ("kind", ctypes.c_int64),
    )

    @classmethod
    def of(cls, parts: LayerParts, sinks: torch.Tensor | None) -> CLayer:
        """Without a cache, a kind or adapters. `sinks` are the layer's in float32, contiguous. Nothing is
        kept alive.
        """
        return cls(
            *(_CNorm.of(getattr(parts, name)) for name in NORM_NAMES),
            *(getattr(parts, name).on_c_side for name in LINEAR_NAMES),
            *(getattr(parts, name) for name in _SIZES),
            parts.activation,
            CAttention(
                query_token_stride=parts.qkv.out_features,
                query_head_stride=parts.head_dim,
                scaling=parts.scaling,
                softcap=parts.softcap or 0.0,
                sinks=None if sinks is None else sinks.data_ptr(),
            ),
        )


class CStep(ctypes.Structure):
    _fields_ = (
        ("num_tokens", ctypes.c_int64),
        ("batches", ctypes.POINTER(ctypes.POINTER(CAttentionBatch))),
        ("slots", ctypes.POINTER(ctypes.c_void_p)),
        *((name, ctypes.c_void_p) for name in ("cosines", "sines", "normed", "qkv", "attended", "gated")),
        ("lora", ctypes.POINTER(CLoraBatch)),
    )
