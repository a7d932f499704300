"""What a layer has cached, and how much memory that is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .quantize_kv import LARGEST, SCALE_DTYPE, KVScales, quantize


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer, `[num_blocks, block_size, num_kv_heads, head_dim]` each, contiguous.

    Where they are quantized (`quantize_kv`) they are codes, and `scales` is what these are multiplied with.
    """

    keys: torch.Tensor
    values: torch.Tensor
    scales: KVScales | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All there is of a block: its row in each of these."""
        return (self.keys, self.values, *(self.scales or ()))

    def fill_with_noise(self, num_blocks: int) -> None:
        """Store normal values in the first blocks."""
        for tensor, scales in zip((self.keys, self.values), self.scales or (None, None), strict=True):
            noise = torch.randn(tensor[:num_blocks].shape, device=tensor.device)
            if scales is None:
                tensor[:num_blocks].copy_(noise)
            else:
                codes, their_scales = quantize(noise, tensor.dtype)
                tensor[:num_blocks].copy_(codes)
                scales[:num_blocks].copy_(their_scales)


@dataclass(frozen=True, slots=True)
class SlotShape:
    """What one token leaves in one layer's cache: so many heads of keys and of values, in `dtype`, with scales where
    that is one of `quantize_kv`'s.
    """

    num_kv_heads: int
    key_head_dim: int
    value_head_dim: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        values_bytes = (self.key_head_dim + self.value_head_dim) * self.dtype.itemsize
        return self.num_kv_heads * (values_bytes + (2 * SCALE_DTYPE.itemsize if self._is_quantized else 0))

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> LayerCache:
        """Not cleared: no slot is read before it was written, and on a CPU untouched pages take no memory."""
        slots = num_blocks, block_size, self.num_kv_heads

        def empty(*size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        return LayerCache(
            empty(*slots, self.key_head_dim, dtype=self.dtype),
            empty(*slots, self.value_head_dim, dtype=self.dtype),
            KVScales(empty(*slots, dtype=SCALE_DTYPE), empty(*slots, dtype=SCALE_DTYPE))
            if self._is_quantized
            else None,
        )

    @property
    def _is_quantized(self) -> bool:
        return self.dtype in LARGEST
