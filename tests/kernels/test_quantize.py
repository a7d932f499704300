"""Weights in 8 and 4 bits: how far from the originals they are, and that the kernel computes with them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from kernels import linear as linear_kernel
from kernels.linear import linear, pack_quantized
from kernels.quantize import QuantizedWeight, quantize_int4, quantize_int8

from .libraries import each_library

Quantize = Callable[[torch.Tensor], QuantizedWeight]

both_formats = pytest.mark.parametrize("quantize", [quantize_int8, quantize_int4])

dtype = each_library(linear_kernel, autouse=False)
pytestmark = pytest.mark.usefixtures("inference")


# Rounding


def test_in_8_bits_a_weight_moves_by_half_a_step_of_its_output_at_most() -> None:
    weight = torch.randn(50, 70) * torch.logspace(-6, 6, 50)[:, None]
    moved = (quantize_int8(weight).dequantized(torch.float32) - weight).abs()
    assert (moved <= weight.abs().amax(dim=1, keepdim=True) / 127 / 2 * 1.0001).all()


def test_in_4_bits_a_weight_moves_by_half_a_step_of_its_group_at_most() -> None:
    """And by what scale and centre lose in bfloat16: half a 256th of the group's largest value, and of seven scales."""
    weight = torch.randn(50, 96) * torch.logspace(-6, 6, 50)[:, None] + torch.randn(50, 1)
    groups = weight.view(50, 3, 32)
    moved = (quantize_int4(weight).dequantized(torch.float32).view_as(groups) - groups).abs().amax(dim=-1)
    span, largest = groups.amax(dim=-1) - groups.amin(dim=-1), groups.abs().amax(dim=-1)
    assert (moved <= span / 15 / 2 * 1.01 + largest / 256 + span / 256).all()


@both_formats
def test_what_is_on_the_grid_stays_what_it_is(quantize: Quantize) -> None:
    once = quantize(torch.randn(8, 64)).dequantized(torch.float32)
    twice = quantize(once).dequantized(torch.float32)
    torch.testing.assert_close(twice, once, rtol=1e-2, atol=1e-2)


@both_formats
def test_zeros_and_equal_weights_stay_what_they_are(quantize: Quantize) -> None:
    for value in (0.0, 0.5, -3.0):
        assert (quantize(torch.full((3, 40), value)).dequantized(torch.float32) == value).all()


@both_formats
def test_an_output_does_not_depend_on_the_others(quantize: Quantize) -> None:
    """More of them than are rounded at once."""
    weight = torch.randn(5000, 33)
    alone = quantize(weight[4990:])
    assert torch.equal(quantize(weight).dequantized(torch.float32)[4990:], alone.dequantized(torch.float32))


# The kernel


@both_formats
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("out_features", [1, 33, 64])
@pytest.mark.parametrize("in_features", [1, 31, 32, 67, 333])
def test_the_kernel_computes_with_what_the_codes_stand_for(
    dtype: torch.dtype, in_features: int, out_features: int, bias: bool, quantize: Quantize
) -> None:
    weight = quantize(torch.randn(out_features, in_features))
    b = torch.randn(out_features) if bias else None
    packed = pack_quantized(weight, dtype, b)
    for num_rows in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 36, 37, 130):
        x = torch.randn(num_rows, in_features, dtype=dtype)
        exact = F.linear(x.double(), weight.dequantized(dtype).double(), None if b is None else b.double())
        actual = linear(x, packed)
        assert actual.dtype is dtype and actual.shape == exact.shape
        assert ((actual.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps / 2 + 1e-4).all()


@both_formats
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_row_is_the_same_alone_and_in_any_batch(dtype: torch.dtype, num_threads: int, quantize: Quantize) -> None:
    """Few rows are computed with elements in registers, many with stored ones."""
    x, packed = torch.randn(130, 330, dtype=dtype), pack_quantized(quantize(torch.randn(100, 330)), dtype)
    torch.set_num_threads(1)
    alone = torch.cat([linear(x[row : row + 1], packed) for row in range(130)])
    torch.set_num_threads(num_threads)
    for num_rows in (2, 9, 10, 36, 37, 117, 130):
        assert torch.equal(linear(x[:num_rows], packed), alone[:num_rows])


@both_formats
def test_every_code_means_its_number(dtype: torch.dtype, quantize: Quantize) -> None:
    """One input at a time is 1, so that a sum is one weight; all codes there are occur in every place of a group."""
    num_codes = 255 if quantize is quantize_int8 else 16
    steps = torch.arange(num_codes).float() - num_codes // 2
    weight = quantize(torch.stack([steps.roll(shift)[torch.arange(64) % num_codes] for shift in range(num_codes)]))
    packed = pack_quantized(weight, dtype)
    y = linear(torch.eye(64, dtype=dtype), packed)
    assert torch.equal(y, weight.dequantized(dtype).T.to(dtype))


def test_a_quantized_weight_takes_half_or_a_third_of_the_room() -> None:
    weight = torch.randn(64, 256)
    half, third = (pack_quantized(quantize(weight), torch.bfloat16) for quantize in (quantize_int8, quantize_int4))
    assert half.panels.nbytes == weight.numel()
    assert third.panels.nbytes == weight.numel() * 5 // 8
