"""Which tokens may be drawn: min-p, then top-k, then top-p, each row with its own, without sorting the vocabulary.

Sorted by logit, and by id among equals, what each of the three keeps is the head of the row. So a row's answer is one
place in that order: a logit, and how far equals of it are let in. Tokens are ordered by their raw logits; temperature
divides all of them by the same and only moves the weights w = exp((logit − highest) / temperature), which min-p and
top-p look at.

- min-p keeps w ≥ min_p. That is a condition on a single logit, found by bisection without touching the row.
- top-k keeps the lowest t with fewer than k logits above it, and as many equals of t as are lacking.
- top-p keeps the tokens that less than top_p of the weight W comes before, W being the weight of what the former keep.
  It is the same with weights: the lowest t with less than top_p·W above it, and as many equals as start below that.

Both are a search for t with a measure M(t) = Σ m(logit) over logits > t, which falls as t rises; m is 1 or w. Floats
of one sign are ordered as their bits are, so t is searched among integers: those of 16 bits for bfloat16. A pass over
the row measures above three pivots and leaves a quarter of the range: at most 8 passes for bfloat16, 10 for float16, 16
for float32, fewer when a pivot happens to have exactly the target above it, as with float32 and top-k it nearly always
does. One more pass finds the id of the last equal that is let in. One program has a row, which lies in L2 after the
first pass; sorting a row of 2¹⁷ takes more than that many passes, and writes.

Counts are exact. Weights are summed in float32 in BLOCK lanes, then in float64, in an order that depends on the size of
the vocabulary alone. A weight is off by about (2 + |x|)·2⁻²³ of itself, x = log w, and a lane by V/BLOCK·2⁻²⁴: with
V ≤ 2¹⁸ less than 2⁻¹⁷ of any sum. (torch sums in float64 of weights in float64.) So where top-p ends between two
tokens, and a sum comes within 2⁻¹⁶·W of top_p·W, one of the two may be kept here and not there; nothing else differs.

On a CPU `cpu/restrict.c` counts the logits by value instead, and sums in float64, as torch does.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from . import sampling_in_c
from .dispatch import library_for, uses_triton
from .triton_language import compile_options, constant, jit, next_power_of_2, tl

# Sorting a whole vocabulary costs a CPU as much as a small model's step; nearly always these many tokens decide.
_FIRST_LOOK = 1024
# Bits of float32 that a type's values never use.
_UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
_LOG2_E = constant(math.log2(math.e))


class Restrictions(NamedTuple):
    """One of each per row: int64 `top_k` (0 is off), float64 `top_p` > 0 (1 and more are off), `min_p` (0 is off)."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


class Kept(NamedTuple):
    """The tokens with logits above `threshold`, and those equal to it with ids up to `last_equal`.

    Float32 and int64 `[num_rows]`. Which of several such pairs for the same tokens it is, is left open.
    """

    threshold: torch.Tensor
    last_equal: torch.Tensor


def restrict(
    logits: torch.Tensor, highest: torch.Tensor, temperature: torch.Tensor, restrictions: Restrictions
) -> Kept:
    """What may be drawn from `logits` `[num_rows, vocab_size]`.

    Args:
        highest: each row's highest logit, float32 `[num_rows]`, finite.
        temperature: float32 `[num_rows]`; a row with 0 is greedy, and keeps all.

    The first token always stays. Tokens of −inf may be among the kept, or not.
    """
    library = library_for(logits)
    if library is not None:
        return Kept(*sampling_in_c.restrict(library, logits, highest, temperature, restrictions))
    compute = _launch if uses_triton(logits) else reference
    return compute(logits, highest, temperature, restrictions)


def scale(logits: torch.Tensor, highest: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Float32 logits as temperature has them: shifted to a maximum of 0, so that a tiny one makes −inf, never NaN."""
    return (logits - highest) / temperature


def reference(
    logits: torch.Tensor, highest: torch.Tensor, temperature: torch.Tensor, restrictions: Restrictions
) -> Kept:
    """As `restrict`, in torch."""
    kept = Kept(torch.full_like(highest, -math.inf), torch.full_like(restrictions.top_k, -1))
    is_restricted = (restrictions.top_k > 0) | (restrictions.top_p < 1) | (restrictions.min_p > 0)
    for rows in (is_restricted & (temperature > 0)).nonzero().flatten().split(rows_at_once(logits.shape[-1])):
        of_rows = (highest[rows], temperature[rows], Restrictions(*(values[rows] for values in restrictions)))
        kept.threshold[rows], kept.last_equal[rows] = _restrict(logits[rows].float(), *of_rows)
    return kept


def rows_at_once(vocab_size: int) -> int:
    """As many as a CPU's cache holds in float64, besides what else is needed: one of a usual vocabulary."""
    return max(1, 2**16 // vocab_size)


def _restrict(
    logits: torch.Tensor, highest: torch.Tensor, temperature: torch.Tensor, restrictions: Restrictions
) -> Kept:
    top_k, top_p, min_p = restrictions
    num_rows, vocab_size = logits.shape
    likely = Kept(torch.full_like(highest, -math.inf), torch.full_like(top_k, vocab_size))
    if (min_p > 0).any():
        is_likely = scale(logits, highest[:, None], temperature[:, None]) >= min_p.log().float()[:, None]
        likely = likely._replace(threshold=logits.masked_fill(~is_likely, math.inf).amin(dim=-1))
        logits = logits.masked_fill(~is_likely, -math.inf)
    is_off = (top_k <= 0) & (top_p >= 1)
    if is_off.all():
        return likely
    for width in (min(_FIRST_LOOK, vocab_size), vocab_size):
        candidates = logits.topk(width).values
        num_kept = _count_kept(logits, candidates, highest, temperature, top_k, top_p)
        if (is_off | ((num_kept < width) & (top_k <= width))).all():
            break
    threshold = candidates.gather(-1, num_kept[:, None] - 1)
    # Equals are let in by id until the count is reached.
    num_equal = num_kept - (candidates > threshold).sum(dim=-1)
    rows, tokens = (logits == threshold).nonzero(as_tuple=True)
    first = torch.searchsorted(rows, torch.arange(num_rows, device=rows.device))
    is_likely_all = is_off | (threshold[:, 0] == -math.inf)
    return Kept(
        torch.where(is_likely_all, likely.threshold, threshold[:, 0]),
        torch.where(is_likely_all, likely.last_equal, tokens[first + num_equal - 1]),
    )


def _count_kept(
    logits: torch.Tensor,
    candidates: torch.Tensor,
    highest: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> torch.Tensor:
    """How many of `candidates`, each row's highest of `logits` in descending order, top-k and then top-p keep."""
    rank = torch.arange(candidates.shape[-1], device=logits.device)
    in_top_k = (top_k[:, None] <= 0) | (rank < top_k[:, None])
    if (top_p >= 1).all():
        return in_top_k.sum(dim=-1)
    weights = scale(candidates, highest[:, None], temperature[:, None]).double().exp().masked_fill(~in_top_k, 0.0)
    total = weights.sum(dim=-1)
    if (top_k <= 0).any():
        total = torch.where(
            top_k > 0, total, scale(logits, highest[:, None], temperature[:, None]).double().exp().sum(dim=-1)
        )
    before = weights.cumsum(dim=-1) - weights
    # The first token always stays: nothing comes before it. With top_p 1 rounding must not cut the tail.
    in_top_p = (top_p[:, None] >= 1) | (before < top_p[:, None] * total[:, None]) | (rank == 0)
    return (in_top_k & in_top_p).sum(dim=-1)


def launch_options(vocab_size: int, dtype: torch.dtype) -> dict[str, Any]:
    """Constants and compile options for rows of this size and type."""
    block = min(4096, next_power_of_2(vocab_size))
    return {
        "UNUSED_BITS": _UNUSED_BITS[dtype],
        "BLOCK": block,
        # A lone program hides the latency of L2 with its own warps: as many as there can be.
        **compile_options(num_warps=max(1, min(32, block // 128))),
    }


def _launch(logits: torch.Tensor, highest: torch.Tensor, temperature: torch.Tensor, restrictions: Restrictions) -> Kept:
    num_rows, vocab_size = logits.shape
    kept = Kept(
        torch.empty(num_rows, dtype=torch.float32, device=logits.device),
        torch.empty(num_rows, dtype=torch.int64, device=logits.device),
    )
    if num_rows:
        restrict_kernel[(num_rows,)](
            *kept,
            logits,
            highest,
            temperature,
            *restrictions,
            logits.stride(0),
            vocab_size,
            **launch_options(vocab_size, logits.dtype),
        )
    return kept


@jit
def restrict_kernel(  # type: ignore[no-untyped-def]
    threshold,
    last_equal,
    logits,
    highest,
    temperature,
    top_k,
    top_p,
    min_p,
    logits_stride,
    vocab_size,
    UNUSED_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    peak = tl.load(highest + row)
    warmth = tl.load(temperature + row)
    if warmth <= 0:
        tl.store(threshold + row, float("-inf"))
        tl.store(last_equal + row, -1)
        return
    # Beyond float32 it would be infinite, and no number when multiplied by the highest logit's 0.
    rate = tl.minimum(tl.div_rn(_LOG2_E, warmth), 3e38)
    key = _key(float("-inf"), UNUSED_BITS)
    peak_key = _key(peak, UNUSED_BITS)
    # Kept are the logits above that of `key`, and the first `num_equal` of those equal to it: whole numbers in float64.
    num_equal = tl.zeros((), tl.float64)

    least = tl.load(min_p + row)
    if least > 0:
        at = peak_key
        scaled_least = tl.log(least).to(tl.float32)
        while at - key > 1:
            middle = key + (at - key) // 2
            is_likely = tl.div_rn(_value(middle, UNUSED_BITS) - peak, warmth) >= scaled_least
            at = tl.where(is_likely, middle, at)
            key = tl.where(is_likely, key, middle)

    most = tl.load(top_k + row)
    if (most > 0) & (most < vocab_size):
        target = most.to(tl.float64)
        above = _above(logits, vocab_size, peak, rate, key, key, key, UNUSED_BITS, BLOCK, WEIGHS=False)[0]
        if above > target:
            key, above = _search(
                logits, vocab_size, peak, rate, key, peak_key, target, UNUSED_BITS, BLOCK, WEIGHS=False
            )
            num_equal = target - above

    share = tl.load(top_p + row)
    if share < 1:
        above = _above(logits, vocab_size, peak, rate, key, key, key, UNUSED_BITS, BLOCK, WEIGHS=True)[0]
        weight = _weight(_value(key, UNUSED_BITS), peak, rate).to(tl.float64)
        target = share * (above + num_equal * weight)
        if above > target:
            num_equal = tl.zeros((), tl.float64) + vocab_size
            key, above = _search(logits, vocab_size, peak, rate, key, peak_key, target, UNUSED_BITS, BLOCK, WEIGHS=True)
            weight = _weight(_value(key, UNUSED_BITS), peak, rate).to(tl.float64)
        num_equal = tl.minimum(num_equal, tl.ceil((target - above) / tl.maximum(weight, 1e-300)))

    value = _value(key, UNUSED_BITS)
    place = tl.full((), -1, tl.int64)
    if num_equal > 0:
        place = _place_of_equal(logits, vocab_size, value, num_equal.to(tl.int32), BLOCK)
    tl.store(threshold + row, value)
    tl.store(last_equal + row, place)


@jit
def _search(  # type: ignore[no-untyped-def]
    row,
    vocab_size,
    peak,
    rate,
    below,
    at,
    target,
    UNUSED_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHS: tl.constexpr,
):
    """The lowest key in (`below`, `at`] that has at most `target` above it, and what it has; more is above `below`.

    Where it has exactly `target`, another key between the same two logits will do, `below` among them.
    """
    above = tl.zeros((), tl.float64)
    while (at - below > 1) & (above != target):
        width = at - below
        low = below + tl.maximum(width // 4, 1)
        middle = below + width // 2
        high = below + tl.maximum(3 * width // 4, 1)
        above_low, above_middle, above_high = _above(
            row, vocab_size, peak, rate, low, middle, high, UNUSED_BITS, BLOCK, WEIGHS
        )
        below = tl.where(above_low > target, low, below)
        below = tl.where(above_middle > target, middle, below)
        below = tl.where(above_high > target, high, below)
        is_low, is_middle, is_high = above_low <= target, above_middle <= target, above_high <= target
        at = tl.where(is_low, low, tl.where(is_middle, middle, tl.where(is_high, high, at)))
        above = tl.where(is_low, above_low, tl.where(is_middle, above_middle, tl.where(is_high, above_high, above)))
    return at, above


@jit
def _above(  # type: ignore[no-untyped-def]
    row,
    vocab_size,
    peak,
    rate,
    low,
    middle,
    high,
    UNUSED_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHS: tl.constexpr,
):
    """For each of three keys, how many logits lie above its value, or what they weigh: float64."""
    kind: tl.constexpr = tl.float32 if WEIGHS else tl.int32
    low_value, middle_value, high_value = (
        _value(low, UNUSED_BITS),
        _value(middle, UNUSED_BITS),
        _value(high, UNUSED_BITS),
    )
    above_low = tl.zeros((BLOCK,), kind)
    above_middle = tl.zeros((BLOCK,), kind)
    above_high = tl.zeros((BLOCK,), kind)
    # Two loads at once; more do not fit in the registers of so many warps.
    for start in tl.range(0, vocab_size, BLOCK, loop_unroll_factor=2):
        tokens = start + tl.arange(0, BLOCK)
        values = tl.load(row + tokens, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)
        measure = _weight(values, peak, rate) if WEIGHS else tl.full((BLOCK,), 1, kind)
        above_low += tl.where(values > low_value, measure, 0)
        above_middle += tl.where(values > middle_value, measure, 0)
        above_high += tl.where(values > high_value, measure, 0)
    return (
        tl.sum(above_low.to(tl.float64)),
        tl.sum(above_middle.to(tl.float64)),
        tl.sum(above_high.to(tl.float64)),
    )


@jit
def _weight(values, peak, rate):  # type: ignore[no-untyped-def]
    return tl.exp2((values - peak) * rate)


@jit
def _place_of_equal(row, vocab_size, value, number, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The id of the `number`-th logit that is `value`, or of the last one."""
    num_seen = tl.zeros((), tl.int32)
    place = tl.full((), -1, tl.int32)
    for start in tl.range(0, vocab_size, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        values = tl.load(row + tokens, mask=tokens < vocab_size, other=float("nan")).to(tl.float32)
        is_equal = (values == value).to(tl.int32)
        is_let_in = (is_equal > 0) & (num_seen + tl.cumsum(is_equal) <= number)
        place = tl.maximum(place, tl.max(tl.where(is_let_in, tokens, -1)))
        num_seen += tl.sum(is_equal)
    return place.to(tl.int64)


@jit
def _key(value, UNUSED_BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """An int64 that is ordered as the float32 values of a type are, and leaves out no integer between two of them."""
    bits = (tl.zeros((), tl.float32) + value).to(tl.int32, bitcast=True)
    # The bits of negative floats run backwards.
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) >> UNUSED_BITS


@jit
def _value(key, UNUSED_BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The float32 that has this key."""
    bits = (key << UNUSED_BITS).to(tl.int32)
    # `_key` has shifted zeros out of a positive value's bits, ones out of a negative one's, which ran backwards.
    bits = tl.where(bits < 0, (bits | ((1 << UNUSED_BITS) - 1)) ^ 0x7FFFFFFF, bits)
    return bits.to(tl.float32, bitcast=True)
