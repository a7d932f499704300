"""The linear kernel computes what `F.linear` computes, for any sizes, where it was built.

How it takes its place in a model, and what computes where it is missing, is `tests/model/test_passes.py`.
"""

from __future__ import annotations

import ctypes

import pytest
import torch

from kernels import linear as linear_kernel
from kernels.linear import linear, pack_weight, rows_of

from .libraries import each_library

dtype = each_library(linear_kernel)
pytestmark = pytest.mark.usefixtures("inference")


def assert_rounded_once(actual: torch.Tensor, exact: torch.Tensor) -> None:
    """Half a step of its type from `exact`, and what adding up in float32 may contribute."""
    assert actual.shape == exact.shape
    assert ((actual.double() - exact).abs() <= exact.abs() * torch.finfo(actual.dtype).eps / 2 + 1e-4).all()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("out_features", [1, 31, 32, 33, 64, 100])
@pytest.mark.parametrize("in_features", [1, 2, 7, 64, 333])
def test_sizes_need_not_be_multiples_of_anything(
    dtype: torch.dtype, in_features: int, out_features: int, bias: bool
) -> None:
    weight = torch.randn(out_features, in_features, dtype=dtype)
    b = torch.randn(out_features, dtype=dtype) if bias else None
    packed = pack_weight(weight, b)
    for num_rows in (*range(40), 70, 118, 300):
        x = torch.randn(num_rows, in_features, dtype=dtype)
        exact = x.double() @ weight.double().T + (0 if b is None else b.double())
        assert_rounded_once(linear(x, packed), exact)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_a_row_is_the_same_in_any_batch_and_any_number_of_threads(dtype: torch.dtype, num_threads: int) -> None:
    x, packed = torch.randn(150, 576, dtype=dtype), pack_weight(torch.randn(200, 576, dtype=dtype))
    torch.set_num_threads(1)
    alone = torch.cat([linear(x[row : row + 1], packed) for row in range(150)])
    torch.set_num_threads(num_threads)
    for num_rows in (1, 2, 9, 10, 64, 117, 118, 150):
        assert torch.equal(linear(x[:num_rows], packed), alone[:num_rows])


def test_inputs_need_not_be_contiguous_nor_two_dimensional(dtype: torch.dtype) -> None:
    weight = torch.randn(48, 32, dtype=dtype)
    x = torch.randn(2, 9, 96, dtype=dtype)[:, ::2, 24:56]
    assert_rounded_once(linear(x, pack_weight(weight)), x.double() @ weight.double().T)


def test_weights_need_not_be_contiguous(dtype: torch.dtype) -> None:
    weight, x = torch.randn(32, 48, dtype=dtype).T, torch.randn(3, 32, dtype=dtype)
    assert_rounded_once(linear(x, pack_weight(weight)), x.double() @ weight.double().T)


def test_nothing_is_written_beside_the_output(dtype: torch.dtype) -> None:
    """The panel's other outputs would lie in the next row, and beyond the last one."""
    packed, x = pack_weight(torch.randn(33, 8, dtype=dtype)), torch.randn(11, 8, dtype=dtype)
    y = torch.full((13, 33), 7.0, dtype=dtype)
    product = linear_kernel.CProduct(ctypes.pointer(packed.on_c_side), None, x.data_ptr(), y[1:].data_ptr(), None, 11)
    linear_kernel.library(dtype).linear(ctypes.byref(product), 2)
    assert torch.equal(y[1:12], linear(x, packed))
    assert (y[[0, 12]] == 7).all()


@pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (33, 8), (64, 7)])
def test_rows_are_found_in_a_packed_weight(dtype: torch.dtype, out_features: int, in_features: int) -> None:
    weight = torch.randn(out_features, in_features, dtype=dtype)
    outputs = torch.randint(out_features, (3, 5))
    assert torch.equal(rows_of(pack_weight(weight), outputs), weight[outputs])
    with pytest.raises(IndexError):
        rows_of(pack_weight(weight), torch.tensor([64]))


def test_what_is_not_a_number_stays_in_its_row(dtype: torch.dtype) -> None:
    packed, x = pack_weight(torch.randn(40, 16, dtype=dtype)), torch.randn(12, 16, dtype=dtype)
    expected = linear(x, packed)
    x[5, 3] = float("nan")
    y = linear(x, packed)
    assert y[5].isnan().all()
    y[5] = expected[5]
    assert torch.equal(y, expected)


def test_what_the_kernel_cannot_read_is_refused(dtype: torch.dtype) -> None:
    packed, name = pack_weight(torch.randn(4, 16, dtype=dtype)), str(dtype).removeprefix("torch.")
    for x, got in (
        (torch.zeros(2, 16, dtype=torch.float16), r"float16 \[2, 16\] on cpu"),
        (torch.zeros(2, 17, dtype=dtype), rf"{name} \[2, 17\] on cpu"),
        (torch.zeros(2, 16, dtype=dtype, device="meta"), rf"{name} \[2, 16\] on meta"),
    ):
        with pytest.raises(ValueError, match=rf"expected {name} \[..., 16\] on the CPU, got {got}"):
            linear(x, packed)


def test_without_the_library_the_error_says_so(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_kernel, "library", lambda _: None)
    assert not linear_kernel.is_available(dtype)
    with pytest.raises(RuntimeError, match="there is no linear kernel for"):
        linear(torch.randn(1, 4, dtype=dtype), pack_weight(torch.randn(4, 4, dtype=dtype)))
