"""The gate of a gated feed-forward layer: SiLU or GELU of one projection, times the other.

    y = g · σ(c·(g + k·g³)) · u        SiLU: c = 1, k = 0        GELU (tanh): c = √(8/π), k = 0.044715

The tanh form of GELU is ½·g·(1 + tanh(z)) with z = √(2/π)·(g + k·g³), and ½·(1 + tanh z) = σ(2z), so two constants
are all that differs. The activation is rounded to the tensors' type before it is multiplied, as two torch operations
would do it. (Shazeer, "GLU Variants Improve Transformer", 2020.)

Nothing is reused, so this is a matter of bandwidth: n values of b bytes take 2·n·b in and n·b out, where two operations
would move 5·n·b. Each program takes `BLOCK` columns of one row; both projections may be halves of one merged result.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F

from .dispatch import uses_triton
from .triton_language import compile_options, constant, jit, tl

# As transformers' configurations name them.
Activation = Literal["silu", "gelu_pytorch_tanh"]

_GELU_SCALE = constant(math.sqrt(8 / math.pi))
_GELU_CUBIC = constant(0.044715)


def gated_activation(gate: torch.Tensor, up: torch.Tensor, *, activation: Activation = "silu") -> torch.Tensor:
    """`activation(gate) * up`, for tensors of one type and of shape `[..., intermediate_size]`.

    Halves of a merged `[..., 2 * intermediate_size]` are fine as they come (`merged.chunk(2, dim=-1)`): only the last
    dimension has to be contiguous. Returns a contiguous tensor; no argument is written to.
    """
    compute = _launch if uses_triton(gate) else reference
    return compute(gate, up, activation)


def reference(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """As `gated_activation`, in torch."""
    activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return activated * up


def launch_options() -> dict[str, Any]:
    """Constants and compile options: each thread has 16 bytes of a 2-byte type, the widest load there is, from both."""
    return {"BLOCK": 1024, **compile_options(num_warps=4)}


def _launch(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    size = gate.shape[-1]
    output = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if output.numel():
        gates, ups = gate.reshape(-1, size), up.reshape(-1, size)
        options = launch_options()
        blocks_per_row = -(-size // options["BLOCK"])
        gated_activation_kernel[(len(gates) * blocks_per_row,)](
            *(output, gates, ups),
            *(gates.stride(0), ups.stride(0)),
            *(size, blocks_per_row),
            IS_GELU=activation != "silu",
            **options,
        )
    return output


@jit
def gated_activation_kernel(  # type: ignore[no-untyped-def]
    output,
    gate,
    up,
    gate_stride,
    up_stride,
    size,
    blocks_per_row,
    IS_GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    columns = tl.program_id(0) % blocks_per_row * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gates = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if IS_GELU:
        activated = gates * tl.sigmoid((gates + gates * gates * gates * _GELU_CUBIC) * _GELU_SCALE)
    else:
        activated = gates * tl.sigmoid(gates)
    activated = activated.to(gate.dtype.element_ty).to(tl.float32)
    tl.store(output + row * size + columns, activated * ups, mask=inside)
