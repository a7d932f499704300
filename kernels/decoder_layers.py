"""Decoder layers of the common kind on a CPU, one after the other in one call: `cpu/layer.c`.

    h = x + after_attention(output(attention(rotate(qkv(before_attention(x))))))
    y = h + after_mlp(down(activation(gate(before_mlp(h))) * up(before_mlp(h))))

Each of the norms may be missing. What transformers computes in some sixty operators a layer, each of which starts
torch's threads and writes its result to memory, is done here by threads that are started once and meet between its
parts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import torch

from .attention import MAX_HEAD_DIM, CAttention
from .attention_batch import AttentionBatch, CAttentionBatch
from .attention_tiles import LayerHeads
from .compiled import library
from .kv_cache import LayerCache
from .kv_cache_in_c import CKVCache, reaches
from .linear import Activation, CWeight, PackedWeight
from .lora_batch import LoraBatch
from .lora_in_c import CLoraBatch, LoraSlots, PackedLora, on_c_side

Angles = tuple[torch.Tensor, torch.Tensor]


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


class _CNorm(ctypes.Structure):
    _fields_ = (("weight", ctypes.c_void_p), ("size", ctypes.c_int64), ("epsilon", ctypes.c_float))

    @classmethod
    def of(cls, norm: Norm | None) -> _CNorm:
        return cls() if norm is None else cls(norm.weight.data_ptr(), len(norm.weight), norm.epsilon)


_NORMS = ("before_attention", "of_queries", "of_keys", "after_attention", "before_mlp", "after_mlp")
LinearName = Literal["qkv", "output", "gate", "up", "down"]
_WEIGHTS: tuple[LinearName, ...] = get_args(LinearName)
_SIZES = ("num_heads", "num_kv_heads", "head_dim", "rotary_dim")


class _CLayer(ctypes.Structure):
    _fields_ = (
        *((name, _CNorm) for name in _NORMS),
        *((name, CWeight) for name in _WEIGHTS),
        *((name, ctypes.c_int64) for name in _SIZES),
        ("activation", ctypes.c_int),
        ("attention", CAttention),
        ("kind", ctypes.c_int64),
    )


class _CStep(ctypes.Structure):
    _fields_ = (
        ("num_tokens", ctypes.c_int64),
        ("batches", ctypes.POINTER(ctypes.POINTER(CAttentionBatch))),
        ("slots", ctypes.POINTER(ctypes.c_void_p)),
        *((name, ctypes.c_void_p) for name in ("cosines", "sines", "normed", "qkv", "attended", "gated")),
        ("lora", ctypes.POINTER(CLoraBatch)),
    )


class AttentionKind(NamedTuple):
    """Layers of one kind attend alike: heads and window are theirs, and where keys and values lie their group's."""

    group: int
    heads: LayerHeads
    sliding_window: int | None


class LayerScratch:
    """Memory for what the parts of a layer leave to each other, used by many layers in turn."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._angles: Angles | None = None
        self._floats: list[torch.Tensor] = []

    def floats(self, angles: Angles) -> list[torch.Tensor]:
        """These in float32, contiguous; converted once for all that are given the same tensors in turn."""
        if self._angles is None or angles[0] is not self._angles[0] or angles[1] is not self._angles[1]:
            self._angles, self._floats = angles, [values.float().contiguous() for values in angles]
        return self._floats

    def take(self, name: str, num_values: int, dtype: torch.dtype) -> torch.Tensor:
        """At least so many values, whatever they are."""
        tensor = self._tensors.get(name)
        if tensor is None or len(tensor) < num_values or tensor.dtype != dtype:
            tensor = self._tensors[name] = torch.empty(num_values, dtype=dtype)
        return tensor


def is_available(dtype: torch.dtype) -> bool:
    """Whether there is a library for this CPU that computes in `dtype`."""
    return library(dtype) is not None


class DecoderLayers:
    """Layers ready to compute in torch's intra-op threads. Those that share a `scratch` run one at a time.

    `kinds` are the different ways in which they attend, once there are caches (`use`).

    Tokens are `[num_tokens, hidden_size]`, contiguous, in the dtype of the weights. Sums are in float32 and rounded
    once per part: norms, rotation and activation are not rounded in between. But for attention, a token's result does
    not depend on the others of its batch. Gradients are not recorded.

    Each linear layer has room for `num_adapter_slots` LoRA adapters (`place`). A step's `lora` says which token has
    which; what it adds is part of the float32 sum. Tokens without one have the same bits as in a step without `lora`.

    Raises:
        ValueError: the parts do not fit each other.
        RuntimeError: there is no library for their dtype.
    """

    def __init__(self, layers: Sequence[LayerParts], scratch: LayerScratch, num_adapter_slots: int = 0) -> None:
        found = library(layers[0].dtype)
        if found is None:
            raise RuntimeError(f"there are no decoder layers for {layers[0].dtype} on this CPU")
        for parts in layers:
            _check(parts, layers[0])
        self.layers = list(layers)
        self._scratch = scratch
        self._library = found
        self.kinds: list[AttentionKind] = []
        self._sinks = [None if parts.sinks is None else parts.sinks.float().contiguous() for parts in layers]
        self._on_c_side = (_CLayer * len(layers))(
            *(
                _CLayer(
                    *(_CNorm.of(getattr(parts, name)) for name in _NORMS),
                    *(getattr(parts, name).on_c_side for name in _WEIGHTS),
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
                for parts, sinks in zip(layers, self._sinks, strict=True)
            )
        )
        self._caches: list[LayerCache] = []
        self._block_size = 0
        self.num_adapter_slots = num_adapter_slots
        self._adapters = [
            {name: _adapter_slots(getattr(parts, name), num_adapter_slots) for name in _WEIGHTS} for parts in layers
        ]
        self._shrunk_sizes = dict.fromkeys(_WEIGHTS, 0)
        if num_adapter_slots:
            for layer, of_layer in zip(self._on_c_side, self._adapters, strict=True):
                for name, adapters in of_layer.items():
                    getattr(layer, name).adapters = ctypes.addressof(adapters.on_c_side)

    def place(self, slot: int, index: int, name: LinearName, packed: PackedLora | None) -> None:
        """From now on the adapter in `slot` has this for one linear layer, or leaves it alone. No step may be computed
        meanwhile.

        Raises:
            ValueError: it is for another linear layer.
        """
        self._adapters[index][name].place(slot, packed)
        if packed is not None:
            self._shrunk_sizes[name] = max(self._shrunk_sizes[name], packed.shrunk_size)

    @property
    def _shrunk_size(self) -> int:
        """How many values a token needs room for, of all that were ever placed: all scratch is kept."""
        sizes = self._shrunk_sizes
        # Gate and up are shrunk together.
        return max(sizes["qkv"], sizes["output"], sizes["gate"] + sizes["up"], sizes["down"])

    def use(self, caches: Sequence[LayerCache], groups: Sequence[int]) -> None:
        """From now on the layers' keys and values are here, in this order, each in a KV cache group.

        Raises:
            ValueError: a cache is not like that.
        """
        block_size = caches[0].keys.shape[1]
        for parts, layer, cache in zip(self.layers, self._on_c_side, caches, strict=True):
            expected = (block_size, parts.num_kv_heads, parts.head_dim)
            for tensor in (cache.keys, cache.values):
                if tensor.shape[1:] != expected or not reaches(cache.keys, cache.values, cache.scales, parts.dtype):
                    raise ValueError(f"{list(tensor.shape)} of {tensor.dtype} is no cache for {parts.heads}")
            layer.attention.cache = CKVCache.of(cache.keys, cache.values, cache.scales)
        kinds = [
            AttentionKind(group, parts.heads, parts.sliding_window)
            for parts, group in zip(self.layers, groups, strict=True)
        ]
        self.kinds = list(dict.fromkeys(kinds))
        for layer, kind in zip(self._on_c_side, kinds, strict=True):
            layer.kind = self.kinds.index(kind)
        self._caches, self._block_size = list(caches), block_size

    def __call__(
        self,
        x: torch.Tensor,
        angles: Angles | None,
        slots: Sequence[torch.Tensor],
        batches: Sequence[AttentionBatch],
        lora: LoraBatch | None = None,
    ) -> torch.Tensor:
        """The last layer's output for the first one's input `x`; keys and values are in the caches afterwards.

        Args:
            angles: cosines and sines, `[1, num_tokens, rotary_dim]` each; not looked at if nothing is rotated.
            slots: for each of `kinds`, `[num_tokens]` int64: where each token's key and value go; −1 is nowhere.
            batches: planned for each of `kinds`.
            lora: who has which adapter; None if nobody has any.

        Raises:
            ValueError: these do not fit each other, or no caches are in use.
        """
        step, y = self._step(x, angles, lora), torch.empty_like(x)
        if not self._caches:
            raise ValueError("there are no caches in use")
        for kind, places, batch in zip(self.kinds, slots, batches, strict=True):
            if len(places) != len(x) or places.dtype is not torch.int64 or not places.is_contiguous():
                raise ValueError(f"{len(x)} tokens have no place in {len(places)} slots of {places.dtype}")
            planned = batch.on_c_side
            if (batch.heads, planned.num_tokens, planned.block_size) != (kind.heads, len(x), self._block_size):
                raise ValueError(
                    f"a step of {planned.num_tokens} tokens in blocks of {planned.block_size} and {batch.heads} is not"
                    f" for {len(x)} in blocks of {self._block_size} and {kind.heads}"
                )
        step.slots = (ctypes.c_void_p * len(slots))(*(places.data_ptr() for places in slots))
        step.batches = (ctypes.POINTER(CAttentionBatch) * len(batches))(
            *(ctypes.pointer(batch.on_c_side) for batch in batches)
        )
        self._library.decoder_layers(
            self._on_c_side,
            ctypes.c_int64(len(self.layers)),
            ctypes.byref(step),
            ctypes.c_void_p(x.data_ptr()),
            ctypes.c_void_p(y.data_ptr()),
            torch.get_num_threads(),
        )
        return y

    def before_attention(
        self, index: int, x: torch.Tensor, angles: Angles | None, lora: LoraBatch | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of one layer: queries, keys and values, `[num_tokens, heads, head_dim]` each, valid until the next call."""
        parts, step = self.layers[index], self._step(x, angles, lora)
        self._library.layer_before_attention(
            ctypes.byref(self._on_c_side[index]),
            ctypes.byref(step),
            ctypes.c_void_p(x.data_ptr()),
            torch.get_num_threads(),
        )
        num_all = parts.num_heads + 2 * parts.num_kv_heads
        heads = self._taken("qkv", len(x), parts.qkv.out_features).view(len(x), num_all, parts.head_dim)
        queries, keys, values = heads.split([parts.num_heads, parts.num_kv_heads, parts.num_kv_heads], dim=1)
        return queries, keys, values

    def after_attention(
        self, index: int, x: torch.Tensor, attended: torch.Tensor, lora: LoraBatch | None = None
    ) -> torch.Tensor:
        """Of one layer: the output for its input `x` and what attention made, `[num_tokens, num_heads, head_dim]`."""
        step, y = self._new_step(len(x), lora), torch.empty_like(x)
        self._taken("attended", len(x), self.layers[index].output.in_features).copy_(attended.reshape(-1))
        self._library.layer_after_attention(
            ctypes.byref(self._on_c_side[index]),
            ctypes.byref(step),
            ctypes.c_void_p(x.data_ptr()),
            ctypes.c_void_p(y.data_ptr()),
            torch.get_num_threads(),
        )
        return y

    def _step(self, x: torch.Tensor, angles: Angles | None, lora: LoraBatch | None) -> _CStep:
        parts = self.layers[0]
        if x.dtype is not parts.dtype or x.shape[1:] != (parts.hidden_size,) or not x.is_contiguous() or not x.is_cpu:
            raise ValueError(f"layers of {parts.dtype} do not take {x.dtype} {list(x.shape)} on {x.device}")
        step = self._new_step(len(x), lora)
        if parts.rotary_dim:
            if angles is None or any(values.shape != (1, len(x), parts.rotary_dim) for values in angles):
                shapes = angles and [list(values.shape) for values in angles]
                raise ValueError(f"{len(x)} tokens are not rotated in {parts.rotary_dim} dimensions by {shapes}")
            step.cosines, step.sines = (values.data_ptr() for values in self._scratch.floats(angles))
        return step

    def _new_step(self, num_tokens: int, lora: LoraBatch | None) -> _CStep:
        sizes = self.layers[0].scratch_sizes
        memory = (self._taken(name, num_tokens, size).data_ptr() for name, size in sizes)
        step = _CStep(num_tokens, None, None, None, None, *memory)
        if lora is not None:
            if len(lora.slots) != num_tokens or max(lora.slots_in_use, default=-1) >= self.num_adapter_slots:
                raise ValueError(
                    f"adapters in slots {lora.slots_in_use} of {len(lora.slots)} tokens are not for {num_tokens} tokens"
                    f" and {self.num_adapter_slots} slots"
                )
            shrunk = self._taken("shrunk", num_tokens, self._shrunk_size)
            step.lora = ctypes.pointer(on_c_side(lora, shrunk, self._shrunk_size))
        return step

    def _taken(self, name: str, num_tokens: int, size: int) -> torch.Tensor:
        return self._scratch.take(name, num_tokens * size, self.layers[0].dtype)[: num_tokens * size]


def _adapter_slots(weight: PackedWeight, num_slots: int) -> LoraSlots:
    return LoraSlots(num_slots, weight.in_features, weight.out_features, weight.dtype)


def _check(parts: LayerParts, first: LayerParts) -> None:
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
    sizes = dict.fromkeys(_NORMS, (hidden,)) | {
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
