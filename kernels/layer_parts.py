"""What a decoder layer of the common kind is made of, and whether that fits together.

`decoder_layers` says what is computed with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch

from .attention import MAX_HEAD_DIM
from .attention_tiles import LayerHeads
from .linear import Activation, PackedWeight

NORM_NAMES = ("before_attention", "of_queries", "of_keys", "after_attention", "before_mlp", "after_mlp")
LinearName = Literal["qkv", "output", "gate", "up", "down"]
LINEAR_NAMES: tuple[LinearName, ...] = get_args(LinearName)


@dataclass(frozen=True, slots=True)
class Norm:
    """Root mean square normalization: `x / sqrt(mean(x²) + epsilon) * weight`, `weight` `[size]` in float32."""

    weight: torch.Tensor
    epsilon: float


@dataclass(frozen=True)
class LayerParts:
    """What a decoder layer is made of; all weights are packed for one dtype.

    Args:
        before_attention, after_attention, before_mlp, after_mlp: of the hidden size.
        of_queries, of_keys: of `head_dim`, or of all heads together.
        qkv: its outputs are `num_heads + 2 * num_kv_heads` heads.
        rotary_dim: how many values of a head are rotated; pairs are half of that apart.
        scaling, sliding_window, softcap, sinks: as `kernels.paged_attention.paged_attention` has them.
    """

    before_attention: Norm | None
    of_queries: Norm | None
    of_keys: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None
    qkv: PackedWeight
    output: PackedWeight
    gate: PackedWeight
    up: PackedWeight
    down: PackedWeight
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    activation: Activation
    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and of everything that is computed with them."""
        return self.qkv.dtype

    @property
    def hidden_size(self) -> int:
        return self.qkv.in_features

    @cached_property
    def heads(self) -> LayerHeads:
        """As attention is told of them."""
        return LayerHeads(self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim, self.dtype)

    @cached_property
    def scratch_sizes(self) -> tuple[tuple[str, int], ...]:
        """What its parts leave to each other, and how many values of each token."""
        return (
            ("normed", self.hidden_size),
            ("qkv", self.qkv.out_features),
            ("attended", self.output.in_features),
            ("gated", self.down.in_features),
        )


def check_parts(parts: LayerParts, first: LayerParts) -> None:
    """Of a layer, and of the first of those it is computed with.

    Raises:
        ValueError: they do not fit each other.
    """
    heads = parts.num_heads * parts.head_dim
    kv_heads = parts.num_kv_heads * parts.head_dim
    hidden, intermediate = parts.hidden_size, parts.up.out_features
    shapes = {
        "qkv": (hidden, heads + 2 * kv_heads),
        "output": (heads, hidden),
        "gate": (hidden, intermediate),
        "up": (hidden, intermediate),
        "down": (intermediate, hidden),
    }
    for name, shape in shapes.items():
        weight = getattr(parts, name)
        if (weight.in_features, weight.out_features) != shape or weight.dtype != parts.dtype:
            raise ValueError(f"{name} is {weight.out_features} by {weight.in_features} of {weight.dtype}")
    sizes = dict.fromkeys(NORM_NAMES, (hidden,)) | {
        "of_queries": (parts.head_dim, heads),
        "of_keys": (parts.head_dim, kv_heads),
    }
    for name, allowed in sizes.items():
        norm = getattr(parts, name)
        if norm is not None and (len(norm.weight) not in allowed or norm.weight.dtype != torch.float32):
            raise ValueError(f"{name} is of {len(norm.weight)} values of {norm.weight.dtype}")
    if parts.num_heads % parts.num_kv_heads or parts.head_dim > MAX_HEAD_DIM:
        raise ValueError(f"attention does not take {parts.heads}")
    if parts.rotary_dim > parts.head_dim or parts.rotary_dim % 2:
        raise ValueError(f"there is no rotation of {parts.rotary_dim} values in {parts.heads}")
    if (parts.dtype, parts.scratch_sizes, parts.rotary_dim) != (first.dtype, first.scratch_sizes, first.rotary_dim):
        raise ValueError("layers of different sizes or rotations do not follow each other")
