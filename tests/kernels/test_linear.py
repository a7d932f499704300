"""The linear kernel computes what `F.linear` computes, for any sizes, where it was built.

How it takes its place in a model, and what computes where it is missing, is `tests/model/test_passes.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels import linear as linear_kernel
from kernels.linear import linear, pack_weight

needs_kernel = pytest.mark.skipif(not linear_kernel.is_available(), reason="no compiler, or no AVX512-BF16")


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def assert_rounded_once(actual: torch.Tensor, exact: torch.Tensor) -> None:
    """Half a step of bfloat16 from `exact`, and what adding up in float32 may contribute."""
    assert actual.dtype == torch.bfloat16
    assert actual.shape == exact.shape
    assert ((actual.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-4).all()


@needs_kernel
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("out_features", [1, 31, 32, 33, 64, 100])
@pytest.mark.parametrize("in_features", [1, 2, 7, 64, 333])
def test_sizes_need_not_be_multiples_of_anything(in_features: int, out_features: int, bias: bool) -> None:
    weight, b = random(out_features, in_features), random(out_features) if bias else None
    packed = pack_weight(weight, b)
    for num_rows in (*range(40), 70, 118, 300):
        x = random(num_rows, in_features)
        exact = x.double() @ weight.double().T + (0 if b is None else b.double())
        assert_rounded_once(linear(x, packed), exact)


@needs_kernel
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_a_row_is_the_same_alone_and_in_any_batch_in_any_number_of_threads(num_threads: int) -> None:
    x, packed = random(150, 576), pack_weight(random(200, 576))
    torch.set_num_threads(1)
    alone = torch.cat([linear(x[row : row + 1], packed) for row in range(150)])
    torch.set_num_threads(num_threads)
    for num_rows in (1, 2, 9, 10, 64, 117, 118, 150):
        assert torch.equal(linear(x[:num_rows], packed), alone[:num_rows])


@needs_kernel
def test_inputs_need_not_be_contiguous_nor_two_dimensional() -> None:
    weight = random(48, 32)
    x = random(2, 9, 96)[:, ::2, 24:56]
    assert_rounded_once(linear(x, pack_weight(weight)), x.double() @ weight.double().T)


@needs_kernel
def test_weights_need_not_be_contiguous() -> None:
    weight, x = random(32, 48).T, random(3, 32)
    assert_rounded_once(linear(x, pack_weight(weight)), x.double() @ weight.double().T)


@needs_kernel
def test_nothing_is_written_beside_the_output() -> None:
    """The panel's other outputs would lie in the next row, and beyond the last one."""
    packed, x = pack_weight(random(33, 8)), random(11, 8)
    y = torch.full((13, 33), 7.0).bfloat16()
    linear_kernel._compiled()(y[1:].data_ptr(), x.data_ptr(), packed.panels.data_ptr(), None, 11, 8, 33, 2)
    assert torch.equal(y[1:12], linear(x, packed))
    assert (y[[0, 12]] == 7).all()


@needs_kernel
def test_what_is_not_a_number_stays_in_its_row() -> None:
    packed, x = pack_weight(random(40, 16)), random(12, 16)
    expected = linear(x, packed)
    x[5, 3] = float("nan")
    y = linear(x, packed)
    assert y[5].isnan().all()
    y[5] = expected[5]
    assert torch.equal(y, expected)


@needs_kernel
@pytest.mark.parametrize(
    ("x", "got"),
    [
        (torch.zeros(2, 16), r"float32 \[2, 16\] on cpu"),
        (torch.zeros(2, 17, dtype=torch.bfloat16), r"bfloat16 \[2, 17\] on cpu"),
        (torch.zeros(2, 16, dtype=torch.bfloat16, device="meta"), r"bfloat16 \[2, 16\] on meta"),
    ],
)
def test_what_the_kernel_cannot_read_is_refused(x: torch.Tensor, got: str) -> None:
    with pytest.raises(ValueError, match=rf"expected bfloat16 \[..., 16\] on the CPU, got {got}"):
        linear(x, pack_weight(random(4, 16)))


def test_without_the_library_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_kernel, "_compiled", lambda: None)
    assert not linear_kernel.is_available()
    with pytest.raises(RuntimeError, match="was not built"):
        linear(random(1, 4), pack_weight(random(4, 4)))
