"""Softmax over keys that come in pieces: the inner loop of attention over a paged cache, for use within kernels.

A row (one query of one head) wants  o = Σ_j 2^(s_j) v_j / Σ_j 2^(s_j)  over the keys j it sees, with s_j = log2(e) ·
scaling · (q · k_j), since GPUs have exp2 and not exp. Any m can be taken out of both sums: with m the largest s so far,
nothing overflows, and when a larger one comes, what was summed up is multiplied by 2^(m − m'):

    m' = max(m, max_j s_j)    a = a · 2^(m − m') + Σ_j 2^(s_j − m') v_j    l = l · 2^(m − m') + Σ_j 2^(s_j − m')

So one pass over the keys suffices, a tile of scores lives in registers only, and several passes over parts of the keys
can be put together (`merge_parts`). (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et
al., "FlashAttention", 2022.)

m begins at a number below all scores that is not −inf: then −inf − m is −inf, never NaN, for rows that see nothing yet.
The products of keys and weights are in the tensors' type with sums in float32; `l` sums the weights before rounding.

Of a quantized cache (`quantize_kv`) codes are multiplied, exact numbers in any of these types. A key's scale goes into
the score, a value's into the weight; weights are bfloat16 then where queries are float16, which has no numbers as small
as a weight times a scale may be.
"""

from __future__ import annotations

from .kv_codes import numbers_of
from .triton_language import constant, dot, jit, tl

LOWEST = constant(-1.0e30)
LOG2_E = constant(1.4426950408889634)


@jit
def attend_keys(  # type: ignore[no-untyped-def]
    accumulator,
    row_max,
    row_sum,
    begin,
    end,
    query,
    see_from,
    see_to,
    table,
    keys,
    values,
    key_scales,
    value_scales,
    scale,
    softcap,
    KEY_BLOCK_STRIDE: tl.constexpr,
    KEY_SLOT_STRIDE: tl.constexpr,
    VALUE_BLOCK_STRIDE: tl.constexpr,
    VALUE_SLOT_STRIDE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_MASKED: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """`accumulator` `[rows, BLOCK_DV]`, `row_max` and `row_sum` `[rows]` after keys `[begin, end)` of one request.

    Where `IS_MASKED`, a row sees `[see_from, see_to)` of them; else all, and their number is a multiple of `BLOCK_N`.
    `table` is the request's block table; `keys` and `values` point at a head's first slot, as do `key_scales` and
    `value_scales` of a quantized cache, None for any other. Other keys are not read.
    `scale` is log2(e) · scaling, and positive. With a softcap it is 2 log2(e) · scaling / cap, and `softcap` is
    log2(e) · cap.
    """
    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_DV)
    WEIGHT_TYPE: tl.constexpr = tl.bfloat16 if query.dtype == tl.float16 else query.dtype
    for start in tl.range(begin, end, BLOCK_N, num_stages=NUM_STAGES):
        positions = start + tl.arange(0, BLOCK_N)
        inside = positions < end
        if IS_MASKED:
            block = tl.load(table + positions // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            key_mask = (dims < HEAD_DIM)[:, None] & inside[None, :]
            value_mask = inside[:, None] & (value_dims < VALUE_DIM)[None, :]
        else:
            block = tl.load(table + positions // BLOCK_SIZE).to(tl.int64)
            key_mask = (dims < HEAD_DIM)[:, None]
            value_mask = (value_dims < VALUE_DIM)[None, :]
        slot = positions % BLOCK_SIZE
        key_places = keys + dims[:, None] + (block * KEY_BLOCK_STRIDE + slot * KEY_SLOT_STRIDE)[None, :]
        key = tl.load(key_places, key_mask, 0.0) if IS_MASKED or BLOCK_D != HEAD_DIM else tl.load(key_places)
        if key_scales is not None:
            scale_places = (block * BLOCK_SIZE + slot) * NUM_KV_HEADS
            key_scale = _load_scales(key_scales + scale_places, inside, IS_MASKED)
            value_scale = _load_scales(value_scales + scale_places, inside, IS_MASKED)
            key = numbers_of(key, query.dtype)
        scores = dot(query, key, tl.zeros((query.shape[0], BLOCK_N), tl.float32))
        if key_scales is not None:
            scores *= key_scale[None, :]
        if HAS_SOFTCAP:
            # tanh(x) = 1 − 2 / (e^2x + 1), right at both ends, where e^2x is 0 or infinite.
            scores = softcap - 2.0 * softcap / (tl.exp2(scores * scale) + 1.0)
        if IS_MASKED:
            seen = (positions[None, :] >= see_from[:, None]) & (positions[None, :] < see_to[:, None])
            scores = tl.where(seen & inside[None, :], scores, float("-inf"))
        if HAS_SOFTCAP:
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            weights = tl.exp2(scores - new_max[:, None])
        else:
            new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
            weights = tl.exp2(scores * scale - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        row_max = new_max
        value_places = values + (block * VALUE_BLOCK_STRIDE + slot * VALUE_SLOT_STRIDE)[:, None] + value_dims[None, :]
        value = tl.load(value_places, value_mask, 0.0) if IS_MASKED or BLOCK_DV != VALUE_DIM else tl.load(value_places)
        if value_scales is None:
            weights = weights.to(value.dtype)
        else:
            weights = (weights * value_scale[None, :]).to(WEIGHT_TYPE)
            value = numbers_of(value, WEIGHT_TYPE)
        accumulator = dot(weights, value, accumulator * shrink[:, None])
    return accumulator, row_max, row_sum


@jit
def _load_scales(places, inside, IS_MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(places, inside, 0.0) if IS_MASKED else tl.load(places)
