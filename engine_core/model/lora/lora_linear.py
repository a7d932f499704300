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
        flat = _rows_of(y, num_rows)
        add_lora(flat, _rows_of(x, num_rows), self._weights, batch)
        return flat.view(y.shape)

    def __getattr__(self, name: str) -> Any:
        """Called for what this module does not have."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)


def _rows_of(x: torch.Tensor, num_rows: int) -> torch.Tensor:
    """`[num_rows, num_features]`, each row in one piece, as kernels read them; a copy where `x` is not stored so.

    Towers that begin with a convolution hand rows on that lie in memory column by column.
    """
    rows = x.reshape(num_rows, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()
