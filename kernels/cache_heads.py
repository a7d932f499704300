"""Heads of one token into its slot of the cache: as they are, or as codes with scales (`quantize_kv`).

`target` points to the slot and `source` to the token, as in `token_heads`; `scales` to the slot's scales, side by side,
where the cache is quantized, and is None where it is not. A program has whole heads, as a scale wants all of one.
"""

from __future__ import annotations

from .kv_codes import codes_of, largest_bits, scales_of
from .token_heads import copy_heads, rotate_heads, rotated_pairs, rounded, store_pairs
from .triton_language import jit, tl


@jit
def write_heads(  # type: ignore[no-untyped-def]
    target,
    scales,
    source,
    target_head_stride,
    source_head_stride,
    first_head,
    num_heads,
    width,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """`HEADS` heads of `width` values from `first_head` on."""
    if scales is None:
        copy_heads(target, source, target_head_stride, source_head_stride, first_head, num_heads, width, HEADS, WIDTH)
    else:
        IS_FP8: tl.constexpr = target.dtype.element_ty == tl.uint8
        heads = first_head + tl.arange(0, HEADS)
        values = _load_heads(source, source_head_stride, first_head, num_heads, width, HEADS, WIDTH)
        their_scales = scales_of(largest_bits(values), IS_FP8)
        tl.store(scales + heads, their_scales, mask=heads < num_heads)
        codes = codes_of(values, their_scales, IS_FP8)
        _store_heads(target, codes, target_head_stride, first_head, num_heads, width, HEADS, WIDTH)


@jit
def rotate_and_write_heads(  # type: ignore[no-untyped-def]
    target,
    scales,
    source,
    cos,
    sin,
    target_head_stride,
    source_head_stride,
    cos_pair_stride,
    sin_pair_stride,
    first_head,
    num_heads,
    num_pairs,
    num_left,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    LEFT: tl.constexpr,
):
    """`HEADS` heads from `first_head` on, rotated as `token_heads.rotate_heads` does it."""
    if scales is None:
        rotate_heads(
            target,
            source,
            cos,
            sin,
            target_head_stride,
            source_head_stride,
            cos_pair_stride,
            sin_pair_stride,
            first_head,
            num_heads,
            num_pairs,
            num_left,
            INTERLEAVED,
            HEADS,
            PAIRS,
            LEFT,
        )
    else:
        IS_FP8: tl.constexpr = target.dtype.element_ty == tl.uint8
        TYPE: tl.constexpr = source.dtype.element_ty
        first, second = rotated_pairs(
            source,
            cos,
            sin,
            source_head_stride,
            cos_pair_stride,
            sin_pair_stride,
            first_head,
            num_heads,
            num_pairs,
            INTERLEAVED,
            HEADS,
            PAIRS,
        )
        # Numbers of the heads' own type, as others store them; what lies behind the last pair is anything.
        heads = first_head + tl.arange(0, HEADS)
        inside = (heads < num_heads)[:, None] & (tl.arange(0, PAIRS) < num_pairs)[None, :]
        first = tl.where(inside, rounded(first, TYPE), 0.0)
        second = tl.where(inside, rounded(second, TYPE), 0.0)
        largest = tl.maximum(largest_bits(first), largest_bits(second))
        if LEFT:
            left = _load_heads(source + 2 * num_pairs, source_head_stride, first_head, num_heads, num_left, HEADS, LEFT)
            largest = tl.maximum(largest, largest_bits(left))
        their_scales = scales_of(largest, IS_FP8)
        tl.store(scales + heads, their_scales, mask=heads < num_heads)
        store_pairs(
            target,
            codes_of(first, their_scales, IS_FP8),
            codes_of(second, their_scales, IS_FP8),
            target_head_stride,
            first_head,
            num_heads,
            num_pairs,
            target.dtype.element_ty,
            INTERLEAVED,
            HEADS,
            PAIRS,
        )
        if LEFT:
            left = codes_of(left, their_scales, IS_FP8)
            behind = target + 2 * num_pairs
            _store_heads(behind, left, target_head_stride, first_head, num_heads, num_left, HEADS, LEFT)


@jit
def _load_heads(  # type: ignore[no-untyped-def]
    source, head_stride, first_head, num_heads, width, HEADS: tl.constexpr, WIDTH: tl.constexpr
):
    """`[HEADS, WIDTH]` in float32, 0 where there is nothing."""
    heads = (first_head + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    places = tl.arange(0, WIDTH)[None, :]
    inside = (heads < num_heads) & (places < width)
    return tl.load(source + heads * head_stride + places, mask=inside, other=0.0).to(tl.float32)


@jit
def _store_heads(  # type: ignore[no-untyped-def]
    target, codes, head_stride, first_head, num_heads, width, HEADS: tl.constexpr, WIDTH: tl.constexpr
):
    heads = (first_head + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    places = tl.arange(0, WIDTH)[None, :]
    inside = (heads < num_heads) & (places < width)
    tl.store(target + heads * head_stride + places, codes, mask=inside)
