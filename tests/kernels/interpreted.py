"""For tests of Triton kernels on a CPU: tensors that show every mistake, and tolerances.

Triton interprets (`tests/conftest.py` sees to that); what a compiler makes of the kernels is for `ahead_of_time`.
"""

from __future__ import annotations

import pytest
import torch

from kernels.triton_language import IS_INTERPRETED

if not IS_INTERPRETED:
    pytest.skip("Triton is not installed, or TRITON_INTERPRET is 0", allow_module_level=True)

from tests.kernels import faster_interpreter
from tests.kernels.tensors import fresh, poisoned, strided

__all__ = ["DTYPES", "UNIT", "assert_close", "fresh", "poisoned", "strided"]

faster_interpreter.install()

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# One unit in the last place of a result that was rounded, or truncated as the interpreter does with bfloat16.
UNIT = {torch.float32: 2.0**-22, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def assert_close(actual: torch.Tensor, expected: torch.Tensor, *, units: float = 2.0) -> None:
    """Equal within so many units in the last place of `actual`'s type, relative to the larger of a value and 1.

    `expected` may be wider: float64, where rounding matters.
    """
    assert actual.shape == expected.shape
    wide, exact = actual.double(), expected.double()
    error = (wide - exact).abs() / exact.abs().clamp(min=1.0)
    # Written so that NaN is a difference.
    worst = error.max().item() if error.numel() else 0.0
    assert worst <= units * UNIT[actual.dtype], f"differs by {worst / UNIT[actual.dtype]:.1f} units"
