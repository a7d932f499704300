"""Linear layers on CPUs: `cpu/linear.c`, for any number of rows.

Where it was not compiled it is missing (`is_available`, `compiled.py`).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from enum import IntEnum

import torch
import torch.nn.functional as F

from .compiled import INPUTS_PER_STEP, PANEL, library
from .quantize import GROUP, Int4Weight, Int8Weight


class Activation(IntEnum):
    """As in cpu/linear.h. `GELU_TANH` is the approximation by a hyperbolic tangent."""

    IDENTITY = 0
    SILU = 1
    GELU_TANH = 2
    GELU = 3
    RELU = 4


class Format(IntEnum):
    """As in cpu/linear.h: what a weight is stored in."""

    ELEMENTS = 0
    INT8 = 1
    INT4 = 2


class CWeight(ctypes.Structure):
    """`Weight` of cpu/linear.h."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("format", ctypes.c_int),
        ("scales", ctypes.c_void_p),
        ("adapters", ctypes.c_void_p),
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
        ("lora", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A linear layer's weight in the order in which the kernel reads it, made by `pack_weight`. `dtype` is what it
    computes in.

    32 outputs make a panel, and within it two inputs of bfloat16 or one of float32 a step. `panels` is
    `[num_panels, num_steps, 32, inputs_per_step]` in `dtype` or int8, or for int4 `[num_panels, num_groups, 640]`:
    groups of bytes as in cpu/quantized.h. `bias`, and of int8 `scales`, are `[num_panels * 32]` in float32. What lies
    beyond the layer's own sizes is zero. `on_c_side` is what kernels are given; it lives as long as this.
    """

    format: Format
    dtype: torch.dtype
    panels: torch.Tensor
    scales: torch.Tensor | None
    bias: torch.Tensor | None
    in_features: int
    out_features: int
    on_c_side: CWeight = field(init=False, repr=False)

    def __post_init__(self) -> None:
        bias, scales = (None if x is None else x.data_ptr() for x in (self.bias, self.scales))
        on_c_side = CWeight(self.panels.data_ptr(), bias, self.in_features, self.out_features, self.format, scales)
        object.__setattr__(self, "on_c_side", on_c_side)


def is_available(dtype: torch.dtype) -> bool:
    """Whether there is a library for this CPU that computes in `dtype`."""
    return library(dtype) is not None


def pack_weight(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedWeight:
    """A copy of `weight` `[out_features, in_features]` and `bias` `[out_features]`, both bfloat16 or float32."""
    panels = _panels(weight, weight.dtype, INPUTS_PER_STEP[weight.dtype])
    return _packed(Format.ELEMENTS, weight.dtype, panels, None, bias, weight)


def pack_quantized(
    weight: Int8Weight | Int4Weight, dtype: torch.dtype, bias: torch.Tensor | None = None
) -> PackedWeight:
    """A copy of `weight`, and of `bias` `[out_features]` in any type, to compute with in bfloat16 or float32."""
    if isinstance(weight, Int8Weight):
        panels, scales = _panels(weight.codes, dtype, GROUP), _padded(weight.scales)
        return _packed(Format.INT8, dtype, panels, scales, bias, weight.codes)
    in_order = _panels(weight.codes, dtype, GROUP)
    # 128 codes are 16 words, the first 16 in their lowest four bits: a byte has one of them and one of the next 16.
    eights = in_order.view(len(in_order), weight.scales.shape[1], -1, 4, 2, 16)
    codes = (eights[..., 0, :] | eights[..., 1, :] << 4).transpose(-1, -2).flatten(2)
    scales, centres = (
        _padded(x).view(-1, PANEL, x.shape[1]).transpose(1, 2).contiguous().view(torch.uint8)
        for x in (weight.scales, weight.centres)
    )
    return _packed(Format.INT4, dtype, torch.cat([scales, centres, codes], dim=2), None, bias, weight.codes)


def _panels(weight: torch.Tensor, dtype: torch.dtype, input_multiple: int) -> torch.Tensor:
    """`[num_panels, num_steps, 32, inputs_per_step]` of `weight` `[out_features, in_features]`."""
    missing_inputs = -weight.shape[1] % input_multiple
    padded = _padded(F.pad(weight, (0, missing_inputs)) if missing_inputs else weight)
    inputs_per_step = INPUTS_PER_STEP[dtype]
    return padded.reshape(-1, PANEL, padded.shape[1] // inputs_per_step, inputs_per_step).transpose(1, 2).contiguous()


def _padded(x: torch.Tensor) -> torch.Tensor:
    """With zeros behind, so that `x` `[out_features, ...]` fills whole panels."""
    missing = -len(x) % PANEL
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, missing)) if missing else x


def _packed(
    format: Format,
    dtype: torch.dtype,
    panels: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    weight: torch.Tensor,
) -> PackedWeight:
    out_features, in_features = weight.shape
    own_bias = None if bias is None else _padded(bias.detach().to(torch.float32, copy=True))
    return PackedWeight(format, dtype, panels, scales, own_bias, in_features, out_features)


def rows_of(weight: PackedWeight, outputs: torch.Tensor) -> torch.Tensor:
    """`F.embedding`: the weights of some `outputs`, int64 of any shape, `[..., in_features]`; not of quantized weights.

    Raises:
        IndexError: there is no such output; one that its last panel would have room for is all zeros.
    """
    rows = weight.panels[outputs // PANEL, :, outputs % PANEL]
    return rows.flatten(-2)[..., : weight.in_features]


def linear(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """`F.linear` of `x` `[..., in_features]`: sums in float32, rounded once. Gradients are not recorded.

    Runs in torch's intra-op threads. In bfloat16, denormal numbers may count as zero.

    Raises:
        ValueError: `x` has another dtype than the weight, another size or is not on the CPU.
        RuntimeError: there is no library for it.
    """
    dtype = weight.dtype
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
