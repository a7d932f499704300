"""Put together what programs found that each looked at a part of a query's keys.

A part p left its attention o_p and the logarithm (of base 2) of its sum of weights, L_p. Over all keys the sum is
Σ_p 2^(L_p), so

    o = Σ_p 2^(L_p − m) o_p / Σ_p 2^(L_p − m)        with any m, the largest L_p for instance

which is the softmax of `attend_keys` again with parts for keys and L_p for scores. A part without keys has L_p = −∞,
and its o_p is not read. A sink is one more part, of the given score and with o = 0. The result does not depend on how
the keys were divided, but for rounding in float32.

Of each part value_dim + 1 numbers are read, once: with parts of 256 keys or more that is little beside the keys.
"""

from __future__ import annotations

from typing import Any

import torch

from .attend_keys import LOG2_E, LOWEST
from .triton_language import compile_options, jit, next_power_of_2, tl


def merge_parts(
    output: torch.Tensor,
    parts: torch.Tensor,
    part_logs: torch.Tensor,
    merged: torch.Tensor,
    sinks: torch.Tensor | None,
) -> None:
    """Write the attention of tokens that have parts into `output` `[num_tokens, num_heads, value_dim]`, contiguous.

    Args:
        parts: `[num_parts, num_heads, value_dim]` float32, contiguous.
        part_logs: `[num_parts, num_heads]` float32, contiguous; −∞ where a part has no keys.
        merged: `[num_merged, 3]` int32: a token, its first part, and how many it has.
        sinks: `[num_heads]`, natural logarithms.

    A token whose parts are all without keys, where there are no sinks, gets 0.
    """
    num_heads, value_dim = output.shape[1:]
    if len(merged):
        merge_parts_kernel[(len(merged) * num_heads,)](
            *(output, parts, part_logs, merged, part_logs if sinks is None else sinks),
            NUM_HEADS=num_heads,
            VALUE_DIM=value_dim,
            HAS_SINKS=sinks is not None,
            **launch_options(value_dim),
        )


def launch_options(value_dim: int) -> dict[str, Any]:
    """Constants and compile options for heads of this size."""
    block = next_power_of_2(value_dim)
    return {"BLOCK_DV": block, "BLOCK_PARTS": 16, **compile_options(num_warps=2 if block <= 128 else 4)}


@jit
def merge_parts_kernel(  # type: ignore[no-untyped-def]
    output,
    parts,
    part_logs,
    merged,
    sinks,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    head = tl.program_id(0) % NUM_HEADS
    entry = merged + tl.program_id(0) // NUM_HEADS * 3
    token = tl.load(entry).to(tl.int64)
    first = tl.load(entry + 1)
    num_parts = tl.load(entry + 2)
    dims = tl.arange(0, BLOCK_DV)
    accumulator = tl.zeros((BLOCK_DV,), tl.float32)
    top = tl.full((), LOWEST, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    if HAS_SINKS:
        top = tl.load(sinks + head).to(tl.float32) * LOG2_E
        total += 1.0
    for start in tl.range(0, num_parts, BLOCK_PARTS):
        part = start + tl.arange(0, BLOCK_PARTS)
        rows = (first + part).to(tl.int64) * NUM_HEADS + head
        logs = tl.load(part_logs + rows, mask=part < num_parts, other=float("-inf"))
        is_read = (logs > float("-inf"))[:, None] & (dims < VALUE_DIM)[None, :]
        attended = tl.load(parts + rows[:, None] * VALUE_DIM + dims[None, :], mask=is_read, other=0.0)
        new_top = tl.maximum(top, tl.max(logs, 0))
        weights = tl.exp2(logs - new_top)
        shrink = tl.exp2(top - new_top)
        accumulator = accumulator * shrink + tl.sum(weights[:, None] * attended, 0)
        total = total * shrink + tl.sum(weights, 0)
        top = new_top
    places = (token * NUM_HEADS + head) * VALUE_DIM + dims
    tl.store(output + places, accumulator / tl.where(total > 0.0, total, 1.0), mask=dims < VALUE_DIM)
