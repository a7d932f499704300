"""Attention in Triton's interpreter beside the same in float64: chunks, decodes, divided keys and shared prefixes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import kernels.attention_metadata
from kernels.attention_plan import PlanLimits
from kernels.attention_tiles import LayerHeads
from kernels.dispatch import computed_by
from kernels.paged_attention import paged_attention
from kernels.quantize_kv import KVScales
from tests.kernels.interpreted import UNIT, assert_close, fresh

from .paged_batch import PagedBatch, make_batch, quantized

SCALING = 0.3
FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
INT8, FP8 = torch.int8, torch.float8_e4m3fn
# Beside the result's own rounding there is that of the weights, which the interpreter truncates in bfloat16: with
# values up to 5 that is 5 units. In float32, scores up to 10 are right to a few units, and weights as much less.
UNITS = {FLOAT32: 50.0, FLOAT16: 8.0, BFLOAT16: 8.0}

DECODES = [(1, 1), (1, 17), (1, 100), (1, 64), (1, 16)]
CHUNKS = [(16, 32), (1, 16), (7, 45)]
MIXED = [(1, 90), (20, 20), (5, 37), (1, 3)]

# lengths, what is special about the layer, what is special about the call
CASES: list[tuple[list[tuple[int, int]], dict[str, Any], dict[str, Any]]] = [
    ([(1, 1)], {}, {}),
    ([(15, 15), (16, 16), (17, 17)], {"dtype": BFLOAT16}, {}),
    ([(150, 150)], {"num_heads": 1, "num_kv_heads": 1, "dtype": FLOAT16}, {}),
    ([(70, 100)], {"num_heads": 1, "num_kv_heads": 1}, {"sliding_window": 40}),
    (DECODES, {"num_heads": 8, "num_kv_heads": 1, "dtype": BFLOAT16}, {}),
    (DECODES, {"num_heads": 2, "num_kv_heads": 2, "block_size": 8}, {"sliding_window": 1}),
    (DECODES, {"head_dim": 80, "block_size": 32, "dtype": FLOAT16}, {"sliding_window": 24}),
    (DECODES, {"head_dim": 256, "num_heads": 3, "num_kv_heads": 1}, {"softcap": 3.0}),
    (DECODES, {"head_dim": 40, "value_dim": 20}, {"softcap": 3.0, "sliding_window": 24, "sinks": True}),
    (CHUNKS, {"head_dim": 64}, {"sinks": True}),
    (CHUNKS, {"head_dim": 112, "dtype": BFLOAT16, "block_size": 4}, {"sliding_window": 4096}),
    ([(3, 31), (1, 16)], {"num_heads": 20, "num_kv_heads": 1, "value_dim": 64}, {"softcap": 3.0}),
    (MIXED, {"dtype": BFLOAT16}, {"softcap": 3.0, "sliding_window": 24, "sinks": True}),
    (MIXED, {"block_size": 7}, {"sinks": True, "sliding_window": 50}),
    (MIXED, {"num_heads": 3, "num_kv_heads": 1, "head_dim": 256, "dtype": FLOAT16}, {}),
]


def attend(batch: PagedBatch, **options: Any) -> torch.Tensor:
    with computed_by("triton"):
        return paged_attention(
            *(batch.query, batch.key_cache, batch.value_cache, batch.metadata, batch.scales), **options
        )


def options_of(batch: PagedBatch, call: dict[str, Any]) -> dict[str, Any]:
    sinks = {"sinks": fresh(batch.query.shape[1]) + 4} if "sinks" in call else {}
    return {"scaling": SCALING} | call | sinks


def check(batch: PagedBatch, call: dict[str, Any]) -> None:
    options = options_of(batch, call)
    actual = attend(batch, **options)
    assert actual.dtype == batch.query.dtype
    # With codes, weights are bfloat16 beside queries of float16 as well.
    rounding = BFLOAT16 if batch.scales and actual.dtype == FLOAT16 else actual.dtype
    assert_close(actual, batch.expected(**options), units=UNITS[rounding] * UNIT[rounding] / UNIT[actual.dtype])


def plan_for(
    monkeypatch: pytest.MonkeyPatch, *, num_sms: int = 1, min_part_keys: int = 1 << 20, overhead: int = 1 << 60
) -> None:
    """As if the device were so: on one with a single multiprocessor nothing is divided, of itself."""
    limits = PlanLimits(num_sms, min_part_keys, overhead)
    monkeypatch.setattr(kernels.attention_metadata, "plan_limits", lambda device: limits)


def divide_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_for(monkeypatch, num_sms=1000, min_part_keys=8)


def share_prefixes(monkeypatch: pytest.MonkeyPatch, **limits: int) -> None:
    plan_for(monkeypatch, overhead=0, **limits)


def heads_of(batch: PagedBatch) -> LayerHeads:
    return LayerHeads(
        *(batch.query.shape[1], batch.key_cache.shape[2], batch.query.shape[2], batch.value_cache.shape[3]),
        dtype=batch.query.dtype,
        code_dtype=None if batch.scales is None else batch.key_cache.dtype,
    )


@pytest.mark.parametrize("divided", [False, True], ids=["whole", "divided"])
@pytest.mark.parametrize(("lengths", "layer", "call"), CASES, ids=range(len(CASES)))
def test_equals_float64(
    lengths: list[tuple[int, int]],
    layer: dict[str, Any],
    call: dict[str, Any],
    divided: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (divide_keys if divided else plan_for)(monkeypatch)
    batch = make_batch(lengths, **layer)
    check(batch, call)
    plan = batch.metadata.plan(heads_of(batch), call.get("sliding_window"))
    if not divided:
        assert plan.num_parts == 0
    elif "sliding_window" not in call:
        assert plan.num_parts > 0 or max(seq_len for _, seq_len in lengths) <= 32


GROUPS = {
    "by itself": [(20, 20, [(0, 20)])],
    "side by side": [(50, 50, [(3, 20), (20, 49)])],
    "its head is cached": [(12, 52, [(10, 45)]), (1, 48, [(20, 48)])],
    "and strangers": [(1, 90, []), (27, 60, [(33, 58)]), (10, 33, [(10, 33)]), (1, 5, [])],
}


@pytest.mark.parametrize("call", [{}, {"sliding_window": 24}], ids=["plain", "window"])
@pytest.mark.parametrize("name", GROUPS)
def test_tokens_that_see_each_other_equal_float64(
    name: str, call: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    divide_keys(monkeypatch)
    lengths = [(query_len, seq_len) for query_len, seq_len, _ in GROUPS[name]]
    check(make_batch(lengths, num_heads=3, num_kv_heads=1, groups=[own for *_, own in GROUPS[name]]), call)


# lengths, who shares how many blocks
SHARING = {
    "decodes": ([(1, 100), (1, 70), (1, 65), (1, 81)], [((0, 1, 2, 3), 4)]),
    "decodes and chunks": ([(1, 81), (11, 90), (1, 17), (1, 100), (1, 70)], [((0, 1, 3, 4), 4)]),
    "forks": ([(1, 60), (1, 130), (1, 140), (1, 150), (1, 33), (2, 40)], [((0, 1, 2, 3), 1), ((1, 2, 3), 8)]),
    "two prefixes": ([(1, 70), (1, 130), (1, 140), (1, 66), (1, 150)], [((0, 3), 4), ((1, 2, 4), 7)]),
}


@pytest.mark.parametrize(
    "call",
    [{}, {"sliding_window": 50}, {"sliding_window": 4}, {"softcap": 3.0, "sinks": True, "sliding_window": 90}],
    ids=str,
)
@pytest.mark.parametrize("name", SHARING)
def test_shared_prefixes_equal_float64(name: str, call: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    share_prefixes(monkeypatch)
    lengths, shared = SHARING[name]
    batch = make_batch(lengths, shared=shared)
    check(batch, call)
    is_used = len(batch.metadata.plan(heads_of(batch), call.get("sliding_window")).listed_tokens) > 0
    assert is_used or "sliding_window" in call


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
def test_shared_prefixes_whose_keys_are_divided_equal_float64(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_prefixes(monkeypatch, num_sms=1000, min_part_keys=64)
    batch = make_batch([(1, 150), (1, 140), (3, 150)], dtype=dtype, shared=[((0, 1, 2), 8)], num_heads=2)
    check(batch, {"sinks": True})
    plan = batch.metadata.plan(heads_of(batch), None)
    assert len(plan.listed_tokens) == 5 and plan.num_parts == 5 * 3


def test_however_it_is_planned_the_result_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, shared = SHARING["decodes"]
    batch = make_batch(lengths, shared=shared)
    options = options_of(batch, {"sinks": True})
    outputs = []
    for plan in (plan_for, divide_keys, share_prefixes):
        plan(monkeypatch)
        batch.metadata._plans.clear()
        outputs.append(attend(batch, **options))
    with computed_by("torch"):
        outputs.append(paged_attention(batch.query, batch.key_cache, batch.value_cache, batch.metadata, **options))
    for output in outputs[1:]:
        assert_close(output, outputs[0], units=UNITS[FLOAT32])


# Of which codes, of which queries, and as in `CASES`.
QUANTIZED_CASES: list[tuple[torch.dtype, list[tuple[int, int]], dict[str, Any], dict[str, Any]]] = [
    (INT8, [(1, 1)], {}, {}),
    (FP8, [(15, 15), (16, 16), (17, 17)], {"dtype": BFLOAT16}, {}),
    (INT8, DECODES, {"num_heads": 8, "num_kv_heads": 1, "dtype": BFLOAT16}, {}),
    (FP8, DECODES, {"head_dim": 80, "block_size": 32, "dtype": FLOAT16}, {"sliding_window": 24}),
    (INT8, CHUNKS, {"head_dim": 40, "value_dim": 20}, {"softcap": 3.0, "sliding_window": 24, "sinks": True}),
    (FP8, CHUNKS, {"head_dim": 64}, {"sinks": True}),
    (INT8, MIXED, {"block_size": 7, "dtype": FLOAT16}, {"sinks": True, "sliding_window": 50}),
    (FP8, MIXED, {"num_heads": 3, "num_kv_heads": 1, "head_dim": 256}, {"softcap": 3.0}),
]


@pytest.mark.parametrize(("codes", "lengths", "layer", "call"), QUANTIZED_CASES, ids=range(len(QUANTIZED_CASES)))
def test_quantized_caches_equal_float64(
    codes: torch.dtype,
    lengths: list[tuple[int, int]],
    layer: dict[str, Any],
    call: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What their codes stand for, that is."""
    divide_keys(monkeypatch)
    check(quantized(make_batch(lengths, **layer), codes), call)


@pytest.mark.parametrize(("codes", "dtype"), [(INT8, BFLOAT16), (FP8, FLOAT32)], ids=str)
def test_shared_prefixes_of_quantized_caches_equal_float64(
    codes: torch.dtype, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer ones: reading 8 bits several times costs less."""
    share_prefixes(monkeypatch)
    lengths = [(1, 180), (3, 166), (1, 17), (1, 164)]
    batch = quantized(make_batch(lengths, shared=[((0, 1, 3), 10)], dtype=dtype), codes)
    check(batch, {"sinks": True})
    assert len(batch.metadata.plan(heads_of(batch), None).listed_tokens) > 0


@pytest.mark.parametrize("codes", [INT8, FP8], ids=str)
def test_small_scales_beside_queries_of_float16(codes: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight times a scale is less than float16 has."""
    divide_keys(monkeypatch)
    batch = make_batch(DECODES, dtype=FLOAT16)
    batch.value_cache *= 2.0**-8
    batch = quantized(batch, codes)
    actual = attend(batch, scaling=SCALING)
    error = (actual.double() - batch.expected(scaling=SCALING)).abs().max()
    assert error < 2.0**-8 * 5 * UNIT[BFLOAT16]


def test_a_scale_that_is_no_number_reaches_the_output() -> None:
    """As a value that is none does; but only where the token is seen."""
    batch = quantized(make_batch([(1, 20), (1, 30)], num_heads=2), INT8)
    assert batch.scales is not None
    for scales in batch.scales:
        harmed = [scales.clone() if part is scales else part for part in batch.scales]
        harmed[0 if scales is batch.scales.keys else 1][batch.block_tables[1][0], 3] = torch.nan
        output = attend(replace(batch, scales=KVScales(*harmed)), scaling=SCALING)
        assert output[0].isfinite().all() and output[1].isnan().all()


@pytest.mark.parametrize("codes", [INT8, FP8], ids=str)
def test_every_code_is_read(codes: torch.dtype) -> None:
    """Attention to a single key is its value."""
    batch = quantized(make_batch([(1, 1)], num_heads=1, num_kv_heads=1, value_dim=256), codes)
    numbers = torch.arange(256, dtype=torch.uint8).view(codes)
    numbers = numbers[numbers.float().isfinite()]
    block = batch.block_tables[0][0]
    batch.value_cache[block, 0, 0, : len(numbers)] = numbers
    batch.scales.values[block, 0, 0] = 0.5
    output = attend(batch, scaling=SCALING)[0, 0, : len(numbers)]
    assert torch.equal(output, numbers.float() * 0.5)


def test_a_batch_without_requests() -> None:
    batch = make_batch([], head_dim=64, value_dim=32)
    assert attend(batch, scaling=SCALING).shape == (0, 6, 32)


def test_launches_may_be_replayed_for_other_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a captured graph: the same tables of tiles, other values in the tensors; a place may stay empty."""
    plan_for(monkeypatch, num_sms=1000, min_part_keys=64)
    captured = make_batch([(1, 1)] * 4, planned_seq_len=160)
    captured.metadata.plan(heads_of(captured), None)
    step = make_batch([(1, 150), (1, 3), (1, 64)])
    now = captured.metadata.on_device
    tables = torch.from_numpy(step.metadata.block_tables)
    now.block_tables[:3, : tables.shape[1]] = tables
    now.positions.copy_(torch.tensor([149, 2, 63, -1]))

    query = torch.cat([step.query, fresh(1, 6, 32)])
    with computed_by("triton"):
        output = paged_attention(query, step.key_cache, step.value_cache, captured.metadata, scaling=SCALING)
    assert_close(output[:3], step.expected(scaling=SCALING), units=UNITS[FLOAT32])
    assert output[3].tolist() == torch.zeros(6, 32).tolist()
    assert len(captured.metadata.plan(heads_of(captured), None).narrow) > 4


def test_a_cache_must_hold_a_head_in_one_piece() -> None:
    batch = make_batch([(1, 5)])
    batch.key_cache = batch.key_cache.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(ValueError, match="contiguous"):
        attend(batch, scaling=SCALING)


def test_what_kernels_read_is_copied_and_planned_once_per_step() -> None:
    metadata = make_batch(MIXED).metadata
    heads = LayerHeads(6, 2, 32, 32, FLOAT32)
    assert metadata.on_device is metadata.on_device
    assert metadata.plan(heads, None) is metadata.plan(heads, None)
    assert metadata.plan(heads, 24) is not metadata.plan(heads, None)
    assert np.array_equal(metadata.on_device.positions[:3], [89, 0, 1])
