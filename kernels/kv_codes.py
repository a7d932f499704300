"""Codes of keys and values within Triton kernels: those of `quantize_kv`, to the bit.

Kernels see codes as bytes. Signed ones are whole numbers; unsigned ones are float8 in e4m3, made and read with shifts
and masks: what Triton has for that type it has from compute capability 8.9 on, and rounded otherwise in the
interpreter. The bits of a code,

    sign · exponent (4 bits, less 7) · mantissa (3 bits)

are those of a float32 but for the width of the exponent and its bias: moved to where float32 has them, they are the
number times 2^(7 − 127), numbers below the least normal one included. The other way a float32 loses 20 bits of its
mantissa, rounded to even as integers are. A number below 2^−6, the least normal one, is coded as how many 2^−9 it has:
adding 2^14, whose neighbours are 2^−9 apart, counts them.
"""

from __future__ import annotations

import torch

from .quantize_kv import KVScales
from .triton_language import constant, from_integers, jit, tl

_LARGEST_INT8, _LARGEST_FP8 = constant(127.0), constant(448.0)
_INFINITY = constant(float("inf"))
_SIGN, _NOT_SIGN = constant(0x80), constant(0x7FFFFFFF)
# Float32 without its last 20 bits, less what the biases differ by: 120 · 2³.
_DROPPED_BITS, _HALF_BELOW, _BIAS_CODES = constant(20), constant(0x7FFFF), constant(960)
_LEAST_NORMAL_BITS = constant(0x3C800000)
_COUNTER, _COUNTER_BITS = constant(16384.0), constant(0x46800000)
# Its neighbours are 1 apart: what is added to it is rounded to a whole number, to even where it lies between two.
_ROUNDER = constant(12582912.0)
_PLACED_CODE, _UNBIASED = constant(-0x78100000), constant(2.0**120)


def cache_arguments(
    keys: torch.Tensor, values: torch.Tensor, scales: KVScales | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Caches and scales as kernels are given them: codes of float8 as unsigned bytes, no scales as None."""
    if scales is None:
        return keys, values, None, None
    if keys.dtype == torch.float8_e4m3fn:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    return keys, values, *scales


@jit
def numbers_of(codes, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """What codes stand for before they are scaled: exactly, in float32, float16 or bfloat16."""
    if codes.dtype == tl.int8:
        numbers = from_integers(codes, TYPE)
    else:
        # With the sign in all bits above the code, one mask leaves it and the seven others where they belong.
        placed = (codes.to(tl.int8, bitcast=True).to(tl.int32) << _DROPPED_BITS) & _PLACED_CODE
        numbers = (placed.to(tl.float32, bitcast=True) * _UNBIASED).to(TYPE)
    return numbers


@jit
def largest_bits(values):  # type: ignore[no-untyped-def]
    """The bits of the largest |x| in each row of float32: as integers they lie in the same order, NaN above all."""
    return tl.max(values.to(tl.int32, bitcast=True) & _NOT_SIGN, 1)


@jit
def scales_of(bits, IS_FP8: tl.constexpr):  # type: ignore[no-untyped-def]
    """The scales of heads whose `largest_bits` these are."""
    return tl.math.div_rn(bits.to(tl.float32, bitcast=True), _LARGEST_FP8 if IS_FP8 else _LARGEST_INT8)


@jit
def codes_of(values, scales, IS_FP8: tl.constexpr):  # type: ignore[no-untyped-def]
    """The codes of `values` `[heads, width]`, float32, as bytes; 0 for a number that is not finite."""
    quotients = tl.math.div_rn(values, tl.where(scales == 0.0, _INFINITY, scales)[:, None])
    is_number = quotients <= _INFINITY
    if IS_FP8:
        bits = quotients.to(tl.int32, bitcast=True)
        sign = (bits >> 24) & _SIGN
        # A quotient is beyond the largest only where the scale has few bits itself.
        size = tl.minimum((bits & _NOT_SIGN).to(tl.float32, bitcast=True), _LARGEST_FP8)
        bits = size.to(tl.int32, bitcast=True)
        rounded = (bits + _HALF_BELOW + ((bits >> _DROPPED_BITS) & 1)) >> _DROPPED_BITS
        counted = (size + _COUNTER).to(tl.int32, bitcast=True) - _COUNTER_BITS
        codes = sign | tl.where(bits < _LEAST_NORMAL_BITS, counted, rounded - _BIAS_CODES)
        codes = tl.where(is_number, codes, 0).to(tl.uint8)
    else:
        clipped = tl.minimum(tl.maximum(quotients, -_LARGEST_INT8), _LARGEST_INT8)
        codes = tl.where(is_number, (clipped + _ROUNDER) - _ROUNDER, 0.0).to(tl.int8)
    return codes
