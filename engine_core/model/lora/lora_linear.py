"""A linear layer that adapters add to."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kernels.lora import LoraWeights, add_lora
from kernels.lora_in_c import LoraSlots

from .adapter_rows import AdapterRows, RowKind


class LoraLinear(nn.Module):
    """`base`, which may be any module that computes a linear layer, and what the rows' adapters add to its output.

    Who reads attributes of the layer finds those of `base`: its weight is that of no adapter.
    """

    def __init__(self, base: nn.Module, weights: LoraWeights | LoraSlots, rows: AdapterRows, kind: RowKind) -> None:
        super().__init__()
        self.base = base
        self._weights, self._rows, self._kind = weights, rows, kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x)
        num_rows = x.numel() // x.shape[-1]
        batch = self._rows.batch(self._kind, num_rows, x.device)
        if batch is None:
            return y
        flat = y.reshape(num_rows, y.shape[-1])
        add_lora(flat, x.reshape(num_rows, x.shape[-1]), self._weights, batch)
        return flat.view(y.shape)

    def __getattr__(self, name: str) -> Any:
        """Called for what this module does not have."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)
