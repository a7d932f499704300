"""Tensors for tests of kernels: new values each time, and such as show what should not have been read."""

from __future__ import annotations

import torch


def fresh(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, seed: int | None = None) -> torch.Tensor:
    """Normal values, other ones each time; `seed` makes them the same again."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """NaN everywhere (the largest integer, for integers): what a kernel leaves out, or must not read, shows."""
    if dtype.is_floating_point:
        return torch.full(shape, float("nan"), dtype=dtype)
    return torch.full(shape, torch.iinfo(dtype).max, dtype=dtype)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values in a tensor that is contiguous in its last dimension only, with NaN in between."""
    wide = poisoned(*x.shape[:-1], 2 * x.shape[-1] + 3, dtype=x.dtype)
    view = wide[..., 1 : 1 + x.shape[-1]]
    view.copy_(x)
    return view
