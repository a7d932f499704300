"""Linear layers in bfloat16 on CPUs with AVX512-BF16: `linear.c`, for any number of rows.

Where it was not compiled it is missing (`is_available`, `compiled.py`).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .compiled import load

# As in linear.c.
_PANEL_OUTPUTS = 32


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A linear layer's weight in the order in which the kernel reads it, made by `pack_weight`.

    `panels` `[num_panels, num_pairs, 32, 2]` in bfloat16: 32 outputs make a panel, and within it two inputs a pair.
    `bias` `[num_panels * 32]` in float32. What lies beyond the layer's own sizes is zero.
    """

    panels: torch.Tensor
    bias: torch.Tensor | None
    in_features: int
    out_features: int


def is_available() -> bool:
    """Whether the library was built and this CPU computes in it."""
    return _compiled() is not None


def pack_weight(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedWeight:
    """A copy of `weight` `[out_features, in_features]` and `bias` `[out_features]`, both bfloat16, for `linear`."""
    out_features, in_features = weight.shape
    missing_outputs = -out_features % _PANEL_OUTPUTS
    padded = F.pad(weight, (0, in_features % 2, 0, missing_outputs)) if missing_outputs or in_features % 2 else weight
    num_panels, num_pairs = padded.shape[0] // _PANEL_OUTPUTS, padded.shape[1] // 2
    panels = padded.reshape(num_panels, _PANEL_OUTPUTS, num_pairs, 2).transpose(1, 2).contiguous()
    return PackedWeight(
        panels, None if bias is None else F.pad(bias.float(), (0, missing_outputs)), in_features, out_features
    )


def linear(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """`F.linear` of `x` `[..., in_features]` in bfloat16: sums in float32, rounded once. Gradients are not recorded.

    Runs in torch's intra-op threads. Denormal numbers count as zero.

    Raises:
        ValueError: `x` has another dtype, another size or is not on the CPU.
        RuntimeError: the library is not available.
    """
    if x.dtype is not torch.bfloat16 or x.shape[-1] != weight.in_features or not x.is_cpu:
        raise ValueError(
            f"expected bfloat16 [..., {weight.in_features}] on the CPU,"
            f" got {str(x.dtype).removeprefix('torch.')} {list(x.shape)} on {x.device.type}"
        )
    compute = _compiled()
    if compute is None:
        raise RuntimeError("the linear kernel was not built or this CPU lacks AVX512-BF16")
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], weight.out_features)
    compute(
        y.data_ptr(),
        x.data_ptr(),
        weight.panels.data_ptr(),
        None if weight.bias is None else weight.bias.data_ptr(),
        x.numel() // weight.in_features,
        weight.in_features,
        weight.out_features,
        torch.get_num_threads(),
    )
    return y


@functools.cache
def _compiled() -> Callable[..., None] | None:
    """`linear_bf16` of `linear.c`, or None where it was not built, does not load or is not for this CPU."""
    library = load("_linear")
    if library is None or not library.linear_bf16_is_supported():
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    compute = library.linear_bf16
    compute.argtypes = [pointer, pointer, pointer, pointer, size, size, size, ctypes.c_int]
    compute.restype = None
    return compute
