"""Rotary position embedding: pairs of values of a head, each turned by an angle that grows with the position.

    a' = a · cos θ − b · sin θ
    b' = b · cos θ + a · sin θ

A head's values i and i + n/2 are a pair (Llama, and nearly everyone since), or 2i and 2i + 1 (`interleaved`: Cohere,
GLM, Ernie), where n is how many of its values are turned at all: the first ones; those behind them stay as they are
(Phi, GLM, GPT-NeoX). What is one angle is given once, so any model's tables are cut down to one column for each pair, a
view: `cos[:, :n/2]` where transformers writes it twice one after the other, `cos[:, ::2]` where twice side by side
(Cohere), all of `cos` where once (GPT-OSS). Angles of pictures, with positions in three directions, are angles like
others. (Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.)

Rounding is that of `q * cos + rotate_half(q) * sin` in torch. With `cos` and `sin` of the heads' own type the products
are rounded to it before they are added; with both in float32 (OLMo 2, Cohere) the result alone is.

torch makes six tensors of the size of q on the way; here each value is read once and written once. A program has some
heads of one token, so their angles are read once for all of them.
"""

from __future__ import annotations

from typing import Any

import torch

from .dispatch import uses_triton
from .token_heads import heads_per_program, rotate_heads, side_by_side
from .triton_language import compile_options, jit, next_power_of_2, tl

# Eight pairs for each thread of four warps: 16 bytes in two loads, of a type of two bytes.
_PAIRS_PER_PROGRAM = 1024


def rotary(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    in_place: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`query` and `key` `[num_tokens, heads, head_dim]`, each with its own number of heads, rotated.

    Args:
        cos, sin: `[num_tokens, num_pairs]`, one angle for each pair; `2 * num_pairs` is at most `head_dim`. Of the type
            of `query` and `key`, or float32.
        interleaved: neighbours are a pair.
        in_place: the results are `query` and `key` themselves; else they are new tensors.

    Raises:
        ValueError: in place, and `query` or `key` is not contiguous in its last dimension.
    """
    if in_place and (query.stride(-1) != 1 or key.stride(-1) != 1):
        raise ValueError("in_place: the values of a head do not lie side by side")
    targets = (query, key) if in_place else (query.new_empty(query.shape), key.new_empty(key.shape))
    compute = _launch if uses_triton(query) else reference
    compute(*targets, query, key, cos, sin, interleaved)
    return targets


def reference(
    query_target: torch.Tensor,
    key_target: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
) -> None:
    """As `rotary`, in torch, into the targets."""
    cos, sin = cos[:, None], sin[:, None]
    num_turned = 2 * cos.shape[-1]
    for target, x in ((query_target, query), (key_target, key)):
        turned = x[..., :num_turned]
        first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
        pairs = (first * cos - second * sin, second * cos + first * sin)
        rotated = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
        target[..., :num_turned] = rotated
        if target is not x:
            target[..., num_turned:] = x[..., num_turned:]


def launch_options(num_heads: int, head_dim: int, num_pairs: int) -> dict[str, Any]:
    """Constants and compile options for the larger number of heads."""
    half_width = next_power_of_2(-(-head_dim // 2))
    heads = heads_per_program(num_heads, half_width, _PAIRS_PER_PROGRAM)
    num_left = head_dim - 2 * num_pairs
    return {
        "HEADS": heads,
        "PAIRS": next_power_of_2(num_pairs),
        "LEFT": next_power_of_2(num_left) if num_left else 0,
        **compile_options(num_warps=min(4, max(1, heads * half_width // 256))),
    }


def _launch(
    query_target: torch.Tensor,
    key_target: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
) -> None:
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, num_pairs = key.shape[1], cos.shape[1]
    if not num_tokens:
        return
    query_source, key_source = side_by_side(query), side_by_side(key)
    options = launch_options(max(num_heads, num_kv_heads), head_dim, num_pairs)
    if query_target is query:
        options["LEFT"] = 0
    num_parts = sum(-(-heads // options["HEADS"]) for heads in (num_heads, num_kv_heads))
    rotary_kernel[(num_tokens, num_parts)](
        *(query_target, key_target, query_source, key_source, cos, sin),
        *(stride for x in (query_target, key_target, query_source, key_source) for stride in x.stride()[:2]),
        *(*cos.stride(), *sin.stride()),
        *(num_heads, num_kv_heads, num_pairs, head_dim - 2 * num_pairs),
        INTERLEAVED=interleaved,
        **options,
    )


@jit
def rotary_kernel(  # type: ignore[no-untyped-def]
    query_target,
    key_target,
    query,
    key,
    cos,
    sin,
    query_target_stride,
    query_target_head_stride,
    key_target_stride,
    key_target_head_stride,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    cos_stride,
    cos_pair_stride,
    sin_stride,
    sin_pair_stride,
    num_heads,
    num_kv_heads,
    num_pairs,
    num_left,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    LEFT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    num_query_parts = tl.cdiv(num_heads, HEADS)
    cos += token * cos_stride
    sin += token * sin_stride
    if part < num_query_parts:
        rotate_heads(
            query_target + token * query_target_stride,
            query + token * query_stride,
            cos,
            sin,
            query_target_head_stride,
            query_head_stride,
            cos_pair_stride,
            sin_pair_stride,
            part * HEADS,
            num_heads,
            num_pairs,
            num_left,
            INTERLEAVED,
            HEADS,
            PAIRS,
            LEFT,
        )
    else:
        rotate_heads(
            key_target + token * key_target_stride,
            key + token * key_stride,
            cos,
            sin,
            key_target_head_stride,
            key_head_stride,
            cos_pair_stride,
            sin_pair_stride,
            (part - num_query_parts) * HEADS,
            num_kv_heads,
            num_pairs,
            num_left,
            INTERLEAVED,
            HEADS,
            PAIRS,
            LEFT,
        )
