"""RMS normalisation in Triton's interpreter, beside the same in float64."""

from __future__ import annotations

import pytest
import torch

from kernels.dispatch import computed_by
from kernels.rms_norm import reference, rms_norm
from tests.kernels.interpreted import DTYPES, assert_close, fresh, strided


def exactly(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, unit_offset: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64, rounded only where `rms_norm` promises to."""
    total = x if residual is None else (x.double() + residual.double()).to(x.dtype)
    wide = total.double()
    normalised = wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    return normalised * (weight.double() + unit_offset), total


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 64), (2, 5, 96), (4, 576), (1, 1025), (0, 64)], ids=str)
@pytest.mark.parametrize("has_residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("unit_offset", [False, True], ids=["llama", "gemma"])
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_equals_float64(
    backend: str, unit_offset: bool, has_residual: bool, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, weight = fresh(*shape, dtype=dtype, scale=3), fresh(shape[-1], dtype=dtype)
    residual = fresh(*shape, dtype=dtype) if has_residual else None
    with computed_by(backend):
        output, total = rms_norm(x, weight, 1e-5, residual=residual, unit_offset=unit_offset)
    expected, expected_total = exactly(x, weight, residual, unit_offset)
    assert_close(total, expected_total, units=1)
    # The sum may have been truncated, which the normalised values then show.
    assert_close(output, exactly(total, weight, None, unit_offset)[0], units=4)
    assert output.dtype == total.dtype == dtype and output.shape == expected.shape


def test_rows_that_do_not_follow_one_another() -> None:
    x, residual, weight = fresh(5, 70), fresh(5, 70), fresh(70)
    with computed_by("triton"):
        output, total = rms_norm(strided(x), weight, 1e-6, residual=strided(residual))
    expected, expected_total = reference(x, weight, 1e-6, residual, False)
    assert_close(output, expected)
    assert_close(total, expected_total)


def test_no_argument_is_written_to() -> None:
    x, residual, weight = fresh(5, 64), fresh(5, 64), fresh(64)
    before = [tensor.clone() for tensor in (x, residual, weight)]
    with computed_by("triton"):
        rms_norm(x, weight, 1e-6, residual=residual)
    assert all(torch.equal(now, then) for now, then in zip((x, residual, weight), before, strict=True))
