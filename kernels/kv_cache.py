"""What a layer has cached."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer, `[num_blocks, block_size, num_kv_heads, head_dim]` each, contiguous."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All there is of a block: its row in each of these."""
        return self.keys, self.values
