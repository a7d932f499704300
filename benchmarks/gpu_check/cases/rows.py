"""Operations on each row by itself: RMSNorm and gated activations."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F

from benchmarks.gpu_check.case import Case, Setting, Work, from_torch, in_torch, tensor_bytes
from kernels.gated_activation import gated_activation
from kernels.rms_norm import rms_norm

_SHAPES = ((1, 1), (3, 7), (2, 5, 96), (4, 1025), (0, 64))


def rms_norm_cases(setting: Setting) -> Iterator[Case]:
    def check() -> float:
        return max(
            _check_norm(setting, shape, dtype, has_residual, unit_offset)
            for shape, dtype, has_residual, unit_offset in product(
                _SHAPES, setting.dtypes, (False, True), (False, True)
            )
        )

    yield Case("odd shapes, all types", lambda: Work(check))
    for num_tokens, hidden_size in [(3, 96)] if setting.is_rehearsal else [(64, 4096), (8192, 4096)]:
        name = f"{num_tokens} × {hidden_size}, residual"
        yield Case(name, partial(_norm, setting, num_tokens, hidden_size))


def _check_norm(
    setting: Setting, shape: tuple[int, ...], dtype: torch.dtype, has_residual: bool, unit_offset: bool
) -> float:
    x, weight = setting.normal(*shape, dtype=dtype, scale=3), setting.normal(shape[-1], dtype=dtype)
    residual = setting.normal(*shape, dtype=dtype) if has_residual else None
    return from_torch(lambda: rms_norm(x, weight, 1e-5, residual=residual, unit_offset=unit_offset))


def _norm(setting: Setting, num_tokens: int, hidden_size: int) -> Work:
    x, residual = (setting.normal(num_tokens, hidden_size) for _ in range(2))
    weight = setting.normal(hidden_size)
    return Work(
        lambda: from_torch(lambda: rms_norm(x, weight, 1e-5, residual=residual)),
        run=lambda: rms_norm(x, weight, 1e-5, residual=residual),
        beside=lambda: F.rms_norm(x + residual, (hidden_size,), weight, 1e-5),
        moved_bytes=2 * tensor_bytes(x, residual),
    )


def gated_activation_cases(setting: Setting) -> Iterator[Case]:
    def check() -> float:
        worst = 0.0
        for shape, dtype in product(_SHAPES, setting.dtypes):
            gate, up = setting.normal(*shape, dtype=dtype, scale=4), setting.normal(*shape, dtype=dtype)
            worst = max(worst, _check_gated(gate, up))
        return worst

    yield Case("odd shapes, all types", lambda: Work(check))
    for num_tokens, size in [(3, 96)] if setting.is_rehearsal else [(64, 14336), (8192, 14336)]:
        yield Case(f"{num_tokens} × {size}, merged", partial(_gated, setting, num_tokens, size))


def _check_gated(gate: torch.Tensor, up: torch.Tensor) -> float:
    return from_torch(lambda: [gated_activation(gate, up), gated_activation(gate, up, activation="gelu_pytorch_tanh")])


def _gated(setting: Setting, num_tokens: int, size: int) -> Work:
    gate, up = setting.normal(num_tokens, 2 * size).chunk(2, dim=-1)
    return Work(
        lambda: _check_gated(gate, up),
        run=lambda: gated_activation(gate, up),
        beside=in_torch(lambda: gated_activation(gate, up)),
        moved_bytes=1.5 * tensor_bytes(gate, up),
    )
