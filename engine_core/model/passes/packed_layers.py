"""Linear layers whose weights lie as the CPU computes with them; the original weight is not kept."""

from __future__ import annotations

import torch
from torch import nn

from kernels import linear as linear_kernel
from kernels.quantize import QuantizedWeight


class KernelLinear(nn.Module):
    """`linear`, computed by Foreword's own kernel with `weight`: its own, or `quantized` if that is given."""

    def __init__(self, linear: nn.Linear, quantized: QuantizedWeight | None = None) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.weight = (
            linear_kernel.pack_weight(weight, linear.bias)
            if quantized is None
            else linear_kernel.pack_quantized(quantized, weight.dtype, linear.bias)
        )

    @staticmethod
    def is_usable(dtype: torch.dtype) -> bool:
        """Whether the kernel was built for this CPU."""
        return linear_kernel.is_available(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear_kernel.linear(x, self.weight)


class PackedEmbedding(nn.Module):
    """Embeddings that are the weight of an output head, looked up there."""

    def __init__(self, embedding: nn.Embedding, head: KernelLinear) -> None:
        super().__init__()
        self.num_embeddings = embedding.num_embeddings
        self.embedding_dim = embedding.embedding_dim
        self._weight = head.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return linear_kernel.rows_of(self._weight, ids)


class OnednnLinear(nn.Module):
    """`linear`, computed by oneDNN, which in torch would bring its weight into its own layout on every call."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self._bias = linear.bias
        self._out_features = linear.out_features
        self._compute = torch.ops.mkldnn._linear_pointwise.default

    @staticmethod
    def is_usable(dtype: torch.dtype) -> bool:
        """Whether this build of torch and this CPU compute in packed weights of `dtype` without emulation."""
        operators = ("_reorder_linear_weight", "_linear_pointwise")
        if not torch.backends.mkldnn.is_available() or not all(hasattr(torch.ops.mkldnn, name) for name in operators):
            return False
        return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())

    @staticmethod
    def uses_tiles(dtype: torch.dtype) -> bool:
        """Whether this CPU multiplies `dtype` in tile registers (AMX), which our own kernel does not use."""
        return dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() == 0:
            return x.new_empty(*x.shape[:-1], self._out_features)
        num_rows = x.numel() // x.shape[-1]
        num_padding_rows = padded_rows(num_rows) - num_rows
        if not num_padding_rows:
            return self._compute(x, self._weight, self._bias, "none", [], "")
        rows = nn.functional.pad(x.reshape(num_rows, -1), (0, 0, 0, num_padding_rows))
        out = self._compute(rows, self._weight, self._bias, "none", [], "")
        return out[:num_rows].reshape(*x.shape[:-1], self._out_features)


def padded_rows(num_rows: int) -> int:
    """`num_rows`, rounded up to one of a hundred sizes below 2,048: by an eighth at most, by a sixteenth beyond 256.

    oneDNN generates code for each number of rows it meets, in about a millisecond, and keeps half a megabyte of it.
    """
    step = 1 << max(0, num_rows.bit_length() - (4 if num_rows <= 256 else 5))
    return -(-num_rows // step) * step
