"""Kernels written in C are tested in every library that this CPU can use, not only in the one it would choose."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from kernels.compiled import ELEMENT_TYPES, INSTRUCTION_SETS, load

LIBRARIES = [pytest.param((name, dtype), id=f"{name}-{dtype}") for name in INSTRUCTION_SETS for dtype in ELEMENT_TYPES]


def each_library(*modules: ModuleType, autouse: bool = True) -> Any:
    """A fixture, to be called `dtype`: in turns, these modules of `kernels` have each library, and tests its dtype.

    There is no library for other dtypes then. Tests are skipped where one was not built, or is not for this CPU.
    """

    @pytest.fixture(params=LIBRARIES, autouse=autouse, name="dtype")
    def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
        instruction_set, dtype = request.param
        found = load(instruction_set, dtype)
        if found is None:
            pytest.skip("not built, or not for this CPU")
        for module in modules:
            monkeypatch.setattr(module, "library", {dtype: found}.get)
        return dtype

    return dtype
