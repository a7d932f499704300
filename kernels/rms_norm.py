"""RMS normalisation, with the residual that comes before it.

    h = x + residual            (rounded to the tensors' type, as two torch operations would)
    y = h / sqrt(mean(h²) + eps) · w

A row has `hidden_size` values, at most some ten thousand: one program keeps it in registers, so it is read once and
written once. That is all there is to gain: the sum alone would be read and written by one operation and read again by
the next. Llama multiplies `y`, rounded, by `w`; Gemma multiplies the unrounded `y` by `1 + w` and rounds last, so
`unit_offset` says which. (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.)

Bytes moved per row of n values of b bytes: n·b in and n·b out, and as much again with a residual.
"""

from __future__ import annotations

from typing import Any

import torch

from .dispatch import uses_triton
from .triton_language import compile_options, jit, next_power_of_2, tl


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    unit_offset: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` `[..., hidden_size]` normalised, and what was normalised: `x`, or `x + residual`.

    Args:
        weight: `[hidden_size]`.
        residual: of the shape and type of `x`.
        unit_offset: the weight is `1 + weight`, and rounding comes last (Gemma).

    The second tensor is `x` itself where there is no residual. No argument is written to.
    """
    compute = _launch if uses_triton(x) else reference
    return compute(x, weight, eps, residual, unit_offset)


def reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, unit_offset: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `rms_norm`, in torch."""
    total = x if residual is None else x + residual
    wide = total.float()
    normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (normalised * (1 + weight.float())).to(x.dtype), total
    return normalised.to(x.dtype) * weight, total


def launch_options(hidden_size: int) -> dict[str, Any]:
    """Constants and compile options for rows of this size."""
    block = next_power_of_2(hidden_size)
    return {"BLOCK": block, **compile_options(num_warps=min(16, max(1, block // 512)))}


def _launch(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, unit_offset: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    hidden_size = x.shape[-1]
    rows = x.reshape(-1, hidden_size)
    output = torch.empty_like(rows)
    total = rows if residual is None else torch.empty_like(rows)
    if len(rows):
        before = rows if residual is None else residual.reshape(-1, hidden_size)
        rms_norm_kernel[(len(rows),)](
            *(output, total, rows, before, weight),
            *(rows.stride(0), before.stride(0), output.stride(0)),
            hidden_size,
            eps,
            HAS_RESIDUAL=residual is not None,
            UNIT_OFFSET=unit_offset,
            **launch_options(hidden_size),
        )
    return output.view(x.shape), x if residual is None else total.view(x.shape)


@jit
def rms_norm_kernel(  # type: ignore[no-untyped-def]
    output,
    total,
    x,
    residual,
    weight,
    x_stride,
    residual_stride,
    output_stride,
    hidden_size,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden_size
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
        values = values.to(x.dtype.element_ty)
        tl.store(total + row * output_stride + columns, values, mask=inside)
        values = values.to(tl.float32)
    normalised = values * tl.rsqrt(tl.sum(values * values) / hidden_size + eps)
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        normalised *= 1 + factors
    else:
        normalised = normalised.to(x.dtype.element_ty).to(tl.float32) * factors
    tl.store(output + row * output_stride + columns, normalised, mask=inside)
