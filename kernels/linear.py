"""Linear layers on CPUs: `cpu/linear.c`, for any number of rows.

Where it was not compiled it is missing (`is_available`, `compiled.py`).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from enum import IntEnum

import torch
import torch.nn.functional as F

from .compiled import library

# As in cpu/element.h.
_PANEL = 32
_INPUTS_PER_STEP = {torch.bfloat16: 2, torch.float32: 1}


class Activation(IntEnum):
    """As in cpu/linear.h. `GELU_TANH` is the approximation by a hyperbolic tangent."""

    IDENTITY = 0
    SILU = 1
    GELU_TANH = 2
    GELU = 3
    RELU = 4


class CWeight(ctypes.Structure):
    """`Weight` of cpu/linear.h."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
    )


class CProduct(ctypes.Structure):
    """`Product` of cpu/linear.h."""

    _fields_ = (
        ("weight", ctypes.POINTER(CWeight)),
        ("gate", ctypes.POINTER(CWeight)),
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("activation", ctypes.c_int),
    )


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A linear layer's weight in the order in which the kernel reads it, made by `pack_weight`.

    `panels` `[num_panels, num_steps, 32, inputs_per_step]`: 32 outputs make a panel, and within it two inputs of
    bfloat16 or one of float32 a step. `bias` `[num_panels * 32]` in float32. What lies beyond the layer's own sizes is
    zero. `on_c_side` is what kernels are given; it lives as long as this.
    """

    panels: torch.Tensor
    bias: torch.Tensor | None
    in_features: int
    out_features: int
    on_c_side: CWeight = field(init=False, repr=False)

    def __post_init__(self) -> None:
        bias = None if self.bias is None else self.bias.data_ptr()
        on_c_side = CWeight(self.panels.data_ptr(), bias, self.in_features, self.out_features)
        object.__setattr__(self, "on_c_side", on_c_side)


def is_available(dtype: torch.dtype) -> bool:
    """Whether there is a library for this CPU that computes in `dtype`."""
    return library(dtype) is not None


def pack_weight(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedWeight:
    """A copy of `weight` `[out_features, in_features]` and `bias` `[out_features]`, both bfloat16 or float32."""
    out_features, in_features = weight.shape
    inputs_per_step = _INPUTS_PER_STEP[weight.dtype]
    missing_outputs, missing_inputs = -out_features % _PANEL, -in_features % inputs_per_step
    padded = F.pad(weight, (0, missing_inputs, 0, missing_outputs)) if missing_outputs or missing_inputs else weight
    num_panels, num_steps = padded.shape[0] // _PANEL, padded.shape[1] // inputs_per_step
    panels = padded.reshape(num_panels, _PANEL, num_steps, inputs_per_step).transpose(1, 2).contiguous()
    return PackedWeight(
        panels, None if bias is None else F.pad(bias.float(), (0, missing_outputs)), in_features, out_features
    )


def linear(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """`F.linear` of `x` `[..., in_features]`: sums in float32, rounded once. Gradients are not recorded.

    Runs in torch's intra-op threads. In bfloat16, denormal numbers may count as zero.

    Raises:
        ValueError: `x` has another dtype than the weight, another size or is not on the CPU.
        RuntimeError: there is no library for it.
    """
    dtype = weight.panels.dtype
    if x.dtype is not dtype or x.shape[-1] != weight.in_features or not x.is_cpu:
        raise ValueError(
            f"expected {_name(dtype)} [..., {weight.in_features}] on the CPU,"
            f" got {_name(x.dtype)} {list(x.shape)} on {x.device.type}"
        )
    found = library(dtype)
    if found is None:
        raise RuntimeError(f"there is no linear kernel for {_name(dtype)} on this CPU")
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], weight.out_features)
    product = CProduct(
        ctypes.pointer(weight.on_c_side),
        None,
        x.data_ptr(),
        y.data_ptr(),
        None,
        x.numel() // weight.in_features,
    )
    found.linear(ctypes.byref(product), torch.get_num_threads())
    return y


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
