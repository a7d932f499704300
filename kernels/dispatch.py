"""Who computes: Triton where tensors lie on a GPU and it is installed, C on CPUs where there is some, else torch.

Every kernel's public function asks `uses_triton` once and calls its launcher or its reference. Those that are written
in C, too, ask `library_for` before (`attention` and `linear` go their own way).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch

from .compiled import library
from .triton_language import IS_INSTALLED, IS_INTERPRETED

Backend = Literal["triton", "torch"]

_forced: ContextVar[Backend | None] = ContextVar("forced_backend", default=None)


def uses_triton(tensor: torch.Tensor) -> bool:
    """Whether the Triton implementation computes with this tensor and those beside it."""
    forced = _forced.get()
    if forced is not None:
        return forced == "triton"
    return tensor.is_cuda and IS_INSTALLED and not IS_INTERPRETED


def library_for(tensor: torch.Tensor) -> ctypes.CDLL | None:
    """The C library that computes with this tensor and those beside it; None where another backend does."""
    if _forced.get() is not None or not tensor.is_cpu:
        return None
    return library(tensor.dtype)


@contextmanager
def computed_by(backend: Backend) -> Iterator[None]:
    """Within it, and in this thread or task, `backend` computes whatever has a kernel: to compare, and to test.

    Raises:
        RuntimeError: Triton is not installed.
    """
    if backend == "triton" and not IS_INSTALLED:
        raise RuntimeError("Triton is not installed")
    token = _forced.set(backend)
    try:
        yield
    finally:
        _forced.reset(token)
