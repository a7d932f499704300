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
from typing import NamedTuple

import torch

from .attention_batch import AttentionBatch, CAttentionBatch
from .attention_tiles import LayerHeads
from .compiled import library
from .kv_cache import LayerCache
from .kv_cache_in_c import CKVCache, reaches
from .layer_parts import LINEAR_NAMES, LayerParts, LinearName, check_parts
from .layers_in_c import CLayer, CStep
from .linear import PackedWeight
from .lora_batch import LoraBatch
from .lora_in_c import LoraSlots, PackedLora, on_c_side

Angles = tuple[torch.Tensor, torch.Tensor]


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
            check_parts(parts, layers[0])
        self.layers = list(layers)
        self._scratch = scratch
        self._library = found
        self.kinds: list[AttentionKind] = []
        self._sinks = [None if parts.sinks is None else parts.sinks.float().contiguous() for parts in layers]
        self._on_c_side = (CLayer * len(layers))(*map(CLayer.of, layers, self._sinks))
        self._caches: list[LayerCache] = []
        self._block_size = 0
        self.num_adapter_slots = num_adapter_slots
        self._adapters = [
            {name: _adapter_slots(getattr(parts, name), num_adapter_slots) for name in LINEAR_NAMES} for parts in layers
        ]
        self._shrunk_sizes = dict.fromkeys(LINEAR_NAMES, 0)
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

    def _step(self, x: torch.Tensor, angles: Angles | None, lora: LoraBatch | None) -> CStep:
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

    def _new_step(self, num_tokens: int, lora: LoraBatch | None) -> CStep:
        sizes = self.layers[0].scratch_sizes
        memory = (self._taken(name, num_tokens, size).data_ptr() for name, size in sizes)
        step = CStep(num_tokens, None, None, None, None, *memory)
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
