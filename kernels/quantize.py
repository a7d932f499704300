"""Weights of linear layers in 8 or 4 bits, rounded to the nearest: what they become, and what they then stand for.

`Int8Weight` has one scale for each output, `Int4Weight` a scale and a centre for each output's next 32 inputs (what
torchao calls asymmetric, llama.cpp Q4_1). Neither looks at any text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

GROUP = 32  # inputs; as in cpu/quantized.h
_OUTPUTS_AT_ONCE = 4096  # whose weights exist in float32 meanwhile
_LARGEST_INT8 = 127
_INT4_CENTRE, _LARGEST_INT4 = 8, 15


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """`codes` `[out_features, in_features]`, int8 from -127 to 127, times `scales` `[out_features]` in float32."""

    codes: torch.Tensor
    scales: torch.Tensor

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """`[out_features, in_features]` in float32 whatever `dtype`: the kernel multiplies sums by the scales."""
        del dtype
        return self.codes.float() * self.scales[:, None]

    def split(self, num_outputs: int) -> Iterator[Int8Weight]:
        """Parts of at most so many outputs."""
        return map(Int8Weight, self.codes.split(num_outputs), self.scales.split(num_outputs))


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """`(codes - 8) * scales + centres`: `codes` `[out_features, in_features]`, uint8 from 0 to 15; the others
    `[out_features, num_groups]` in bfloat16, for 32 inputs each, the last group for what is left.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    centres: torch.Tensor

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """`[out_features, in_features]` in `dtype`, rounded once: what the kernel computes with."""
        in_features = self.codes.shape[1]
        scales, centres = (
            x.float().repeat_interleave(GROUP, dim=1)[:, :in_features] for x in (self.scales, self.centres)
        )
        return torch.addcmul(centres, self.codes.float() - _INT4_CENTRE, scales).to(dtype)

    def split(self, num_outputs: int) -> Iterator[Int4Weight]:
        """Parts of at most so many outputs."""
        tensors = (self.codes, self.scales, self.centres)
        return map(Int4Weight, *(tensor.split(num_outputs) for tensor in tensors))


QuantizedWeight = Int8Weight | Int4Weight


def quantize_int8(weight: torch.Tensor) -> Int8Weight:
    """`weight` `[out_features, in_features]` in any floating type. An output's largest weight is met exactly."""
    parts = [_int8_of(part) for part in weight.split(_OUTPUTS_AT_ONCE)]
    return Int8Weight(torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts]))


def quantize_int4(weight: torch.Tensor) -> Int4Weight:
    """`weight` `[out_features, in_features]` in any floating type. A group's 16 values span its own range."""
    parts = [_int4_of(part) for part in weight.split(_OUTPUTS_AT_ONCE)]
    return Int4Weight(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat([part.centres for part in parts]),
    )


def _int8_of(weight: torch.Tensor) -> Int8Weight:
    weight = weight.float()
    scales = weight.abs().amax(dim=1) / _LARGEST_INT8
    return Int8Weight((weight / _divisor(scales)[:, None]).round().to(torch.int8), scales)


def _int4_of(weight: torch.Tensor) -> Int4Weight:
    weight = weight.float()
    out_features, in_features = weight.shape
    # A last group that is not full repeats what it has, so that its range is its own.
    padded = F.pad(weight[None], (0, -in_features % GROUP), mode="replicate")[0]
    groups = padded.view(out_features, -1, GROUP)
    least, largest = groups.aminmax(dim=-1)
    scales = ((largest - least) / _LARGEST_INT4).bfloat16()
    centres = (least + _INT4_CENTRE * scales.float()).bfloat16()
    codes = (groups - centres.float()[..., None]).div_(_divisor(scales.float())[..., None])
    codes = codes.round_().add_(_INT4_CENTRE).clamp_(0, _LARGEST_INT4).to(torch.uint8)
    return Int4Weight(codes.view(out_features, -1)[:, :in_features], scales, centres)


def _divisor(scales: torch.Tensor) -> torch.Tensor:
    return torch.where(scales == 0, 1.0, scales)
