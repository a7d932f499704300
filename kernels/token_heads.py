"""What programs do with heads of one token, a tile of them at a time: copy them, rotate them.

`target` and `source` point to a token; the values of a head lie side by side, heads `…_head_stride` values apart.
"""

from __future__ import annotations

import torch

from .triton_language import jit, next_power_of_2, tl


def heads_per_program(num_heads: int, width: int, values: int) -> int:
    """A power of two: all heads, or as many as together have about so many values, `width` in each."""
    return min(next_power_of_2(num_heads), max(1, values // width))


def side_by_side(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a copy of it where its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


@jit
def copy_heads(  # type: ignore[no-untyped-def]
    target,
    source,
    target_head_stride,
    source_head_stride,
    first_head,
    num_heads,
    width,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """`HEADS` heads of `width` values from `first_head` on, converted to the type of `target`."""
    heads = (first_head + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    places = tl.arange(0, WIDTH)[None, :]
    inside = (heads < num_heads) & (places < width)
    values = tl.load(source + heads * source_head_stride + places, mask=inside)
    tl.store(target + heads * target_head_stride + places, values, mask=inside)


@jit
def rotate_heads(  # type: ignore[no-untyped-def]
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
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    LEFT: tl.constexpr,
):
    """`HEADS` heads from `first_head` on: the first `2 * num_pairs` values of each rotated as `rotary` does it, and
    the `num_left` values behind them copied, unless `LEFT` is 0.
    """
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
    store_pairs(
        target,
        first,
        second,
        target_head_stride,
        first_head,
        num_heads,
        num_pairs,
        source.dtype.element_ty,
        INTERLEAVED,
        HEADS,
        PAIRS,
    )
    if LEFT:
        copy_heads(
            target + 2 * num_pairs,
            source + 2 * num_pairs,
            target_head_stride,
            source_head_stride,
            first_head,
            num_heads,
            num_left,
            HEADS,
            LEFT,
        )


@jit
def rotated_pairs(  # type: ignore[no-untyped-def]
    source,
    cos,
    sin,
    source_head_stride,
    cos_pair_stride,
    sin_pair_stride,
    first_head,
    num_heads,
    num_pairs,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """The first and the second values of each head's pairs, rotated, `[HEADS, PAIRS]` each in float32."""
    heads = (first_head + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    pairs = tl.arange(0, PAIRS)
    exists = pairs < num_pairs
    cosines = tl.load(cos + pairs * cos_pair_stride, mask=exists).to(tl.float32)[None, :]
    sines = tl.load(sin + pairs * sin_pair_stride, mask=exists).to(tl.float32)[None, :]
    from_heads = source + heads * source_head_stride
    # Angles of the values' own type: each product is a number of that type, as torch makes it.
    products: tl.constexpr = cos.dtype.element_ty if cos.dtype == source.dtype else tl.float32
    if INTERLEAVED:
        # Read side by side and parted in registers: every other value by itself would be a load of its own.
        places = tl.arange(0, 2 * PAIRS)[None, :]
        inside = (heads < num_heads) & (places < 2 * num_pairs)
        values = tl.load(from_heads + places, mask=inside).to(tl.float32)
        first, second = tl.split(values.reshape(HEADS, PAIRS, 2))
    else:
        places = pairs[None, :]
        inside = (heads < num_heads) & exists[None, :]
        first = tl.load(from_heads + places, mask=inside).to(tl.float32)
        second = tl.load(from_heads + num_pairs + places, mask=inside).to(tl.float32)
    return _rotated(first, second, cosines, sines, products)


@jit
def store_pairs(  # type: ignore[no-untyped-def]
    target,
    first,
    second,
    target_head_stride,
    first_head,
    num_heads,
    num_pairs,
    TYPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Put the values of pairs where `rotated_pairs` found them, rounded to `TYPE` before they become the target's."""
    heads = (first_head + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    to_heads = target + heads * target_head_stride
    if INTERLEAVED:
        places = tl.arange(0, 2 * PAIRS)[None, :]
        inside = (heads < num_heads) & (places < 2 * num_pairs)
        values = tl.join(first, second).reshape(HEADS, 2 * PAIRS)
        tl.store(to_heads + places, values.to(TYPE), mask=inside)
    else:
        pairs = tl.arange(0, PAIRS)
        places = pairs[None, :]
        inside = (heads < num_heads) & (pairs < num_pairs)[None, :]
        tl.store(to_heads + places, first.to(TYPE), mask=inside)
        tl.store(to_heads + num_pairs + places, second.to(TYPE), mask=inside)


@jit
def _rotated(first, second, cosines, sines, PRODUCTS: tl.constexpr):  # type: ignore[no-untyped-def]
    return (
        rounded(first * cosines, PRODUCTS) - rounded(second * sines, PRODUCTS),
        rounded(second * cosines, PRODUCTS) + rounded(first * sines, PRODUCTS),
    )


@jit
def rounded(values, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """To numbers of `TYPE`, in float32."""
    return values.to(TYPE).to(tl.float32)
