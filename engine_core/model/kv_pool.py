"""The KV pool: what its blocks hold, and their memory.

A block belongs to one group of layers at a time (`kv_groups`). So the first layers of all groups share their memory,
and so do the second ones: one tensor of keys and one of values for each place in a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from engine_core.config import EngineConfig
from engine_core.errors import InvalidConfigError
from kernels.kv_cache import LayerCache
from kernels.quantize_kv import QUANTIZED_TYPES

from .kv_groups import KVGroup
from .support import LayerShape


def choose_kv_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """The type of keys and values in the pool, where `dtype` is that of activations.

    Raises:
        InvalidConfigError: `kv_cache_dtype` is none that there is.
    """
    if config.kv_cache_dtype == "auto":
        return dtype
    if config.kv_cache_dtype not in QUANTIZED_TYPES:
        raise InvalidConfigError(
            f"kv_cache_dtype: {config.kv_cache_dtype!r} is none of auto, {', '.join(sorted(QUANTIZED_TYPES))}"
        )
    return QUANTIZED_TYPES[config.kv_cache_dtype]


@dataclass(frozen=True, slots=True)
class KVPool:
    """Blocks of memory.

    Attributes:
        caches: the layers', by their number.
        group_of: by the same, the layer's place among the groups.
        tensors: all of the memory, once: a block is a row of each.
    """

    caches: Mapping[int, LayerCache]
    group_of: Mapping[int, int]
    tensors: Sequence[torch.Tensor]

    @property
    def num_groups(self) -> int:
        return 1 + max(self.group_of.values())


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """What a block holds: `block_size` tokens of one of `groups`, in `dtype`. `shapes` are the layers', by number."""

    shapes: Mapping[int, LayerShape]
    groups: Sequence[KVGroup]
    block_size: int
    dtype: torch.dtype

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of the groups."""
        return tuple(group.window for group in self.groups)

    @property
    def block_bytes(self) -> int:
        return self.block_size * sum(shape.in_cache(self.dtype).num_bytes for shape in self._places)

    @property
    def _places(self) -> list[LayerShape]:
        """What there is room for in a block: those of the largest group."""
        largest = max(self.groups, key=lambda group: len(group.layers))
        return [self.shapes[layer_idx] for layer_idx in largest.layers]

    def allocate(self, num_blocks: int, device: torch.device) -> KVPool:
        """Not cleared: no slot is read before it was written, and on a CPU untouched pages take no memory."""
        places = [shape.in_cache(self.dtype).allocate(num_blocks, self.block_size, device) for shape in self._places]
        return KVPool(
            caches={
                layer_idx: cache
                for group in self.groups
                for layer_idx, cache in zip(group.layers, places, strict=False)
            },
            group_of={layer_idx: index for index, group in enumerate(self.groups) for layer_idx in group.layers},
            tensors=[tensor for cache in places for tensor in cache.tensors],
        )
