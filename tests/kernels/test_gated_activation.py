"""Gated activations in Triton's interpreter, beside the same in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels.dispatch import computed_by
from kernels.gated_activation import Activation, gated_activation
from tests.kernels.interpreted import DTYPES, assert_close, fresh, strided

# Where the sigmoid is 0, numpy's exponential overflows on the way.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def exactly(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    wide = gate.double()
    return (F.silu(wide) if activation == "silu" else F.gelu(wide, approximate="tanh")) * up.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 3, 96), (2, 1024), (2, 1025), (5, 2500), (0, 64)], ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_equals_float64(backend: str, activation: Activation, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gate, up = fresh(*shape, dtype=dtype, scale=4), fresh(*shape, dtype=dtype)
    with computed_by(backend):
        output = gated_activation(gate, up, activation=activation)
    assert output.dtype == dtype and output.is_contiguous()
    # Both roundings, each a truncation at worst.
    assert_close(output, exactly(gate, up, activation), units=4)


@pytest.mark.parametrize("leading", [(6,), (2, 3)], ids=str)
def test_halves_of_a_merged_projection(leading: tuple[int, ...]) -> None:
    merged = fresh(*leading, 2 * 70)
    before = merged.clone()
    gate, up = merged.chunk(2, dim=-1)
    with computed_by("triton"):
        output = gated_activation(gate, up)
    assert_close(output, exactly(gate, up, "silu"))
    assert torch.equal(merged, before)


def test_rows_that_do_not_follow_one_another() -> None:
    gate, up = fresh(5, 70), fresh(5, 70)
    with computed_by("triton"):
        output = gated_activation(strided(gate), strided(up))
    assert_close(output, exactly(gate, up, "silu"))


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_large_gates_neither_overflow_nor_vanish(activation: Activation) -> None:
    gate = torch.tensor([[-1e30, -1e4, -90.0, 0.0, 90.0, 1e4, 1e30]])
    with computed_by("triton"):
        output = gated_activation(gate, torch.ones_like(gate), activation=activation)
    assert_close(output, gate.clamp(min=0))
