"""The KV pool: what its blocks are made of, and their memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernels.kv_cache import LayerCache

from .support import LayerShape


@dataclass(frozen=True, slots=True)
class KVPool:
    """Blocks of memory. `caches` are the layers', by their number."""

    caches: Mapping[int, LayerCache]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of the memory, once: a block is a row of each."""
        return [tensor for cache in self.caches.values() for tensor in cache.tensors]


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """What a block holds: `block_size` tokens of layers of these shapes, by layer number, in `dtype`."""

    shapes: Mapping[int, LayerShape]
    block_size: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        values_per_token = sum(shape.values_per_token for shape in self.shapes.values())
        return values_per_token * self.dtype.itemsize * self.block_size

    def allocate(self, num_blocks: int, device: torch.device) -> KVPool:
        """Not cleared: no slot is read before it was written, and on a CPU untouched pages take no memory."""

        def allocate(shape: LayerShape, head_dim: int) -> torch.Tensor:
            size = (num_blocks, self.block_size, shape.num_kv_heads, head_dim)
            return torch.empty(size, dtype=self.dtype, device=device)

        return KVPool(
            {
                layer_idx: LayerCache(allocate(shape, shape.key_head_dim), allocate(shape, shape.value_head_dim))
                for layer_idx, shape in self.shapes.items()
            }
        )
