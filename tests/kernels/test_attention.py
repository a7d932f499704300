"""The attention kernel computes what float64 does, for any step, in every library that this CPU can use.

How it takes its place in `paged_attention` is in `test_paged_attention.py`.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from kernels import attention as kernel
from kernels import attention_batch
from kernels.attention import attention, takes
from kernels.attention_tiles import LayerHeads
from kernels.quantize_kv import LARGEST

from .libraries import each_library
from .paged_batch import PagedBatch, make_batch, quantized

# Of what is added up, absolutely: weights and the output are rounded, each by half of it; and what float32 loses.
UNITS = {torch.bfloat16: 2.0**-7 + 2.0**-14, torch.float32: 1e-5}
SPLIT_AMONG = 64

dtype = each_library(kernel, attention_batch)
pytestmark = pytest.mark.usefixtures("inference")


def planned(case: PagedBatch, window: int | None = None, threads: int = 2) -> attention_batch.AttentionBatch:
    heads = LayerHeads(
        *(case.query.shape[1], case.key_cache.shape[2], case.query.shape[2], case.value_cache.shape[-1]),
        case.query.dtype,
    )
    m = case.metadata
    return attention_batch.plan_batch(
        *(m.query_start_loc, m.seq_lens, m.block_tables, m.block_size, heads),
        sliding_window=window,
        visible_to=m.visible_to,
        num_threads=threads,
    )


def computed(case: PagedBatch, window: int | None = None, threads: int = 2, **options: Any) -> torch.Tensor:
    batch = planned(case, window, threads)
    return attention(case.query, case.key_cache, case.value_cache, batch, case.scales, **{"scaling": 0.2, **options})


def exact(
    case: PagedBatch,
    window: int | None = None,
    *,
    scaling: float = 0.2,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64; and the same of the values' magnitudes, which is what rounding is measured with."""
    group_size = case.query.shape[1] // case.key_cache.shape[2]
    visible_to = case.metadata.visible_to
    outputs, magnitudes, row = [], [], 0
    for table, query_len, seq_len in zip(case.block_tables, case.query_lens, case.seq_lens, strict=True):
        keys, values = (
            cache[table].flatten(0, 1)[:seq_len].repeat_interleave(group_size, dim=1) for cache in case.exact_caches()
        )
        scores = torch.einsum("qhd,khd->hqk", case.query[row : row + query_len].double(), keys) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        own = torch.arange(seq_len - query_len, seq_len)[:, None]
        ends = own + 1 if visible_to is None else torch.from_numpy(visible_to[row : row + query_len])[:, None]
        places = torch.arange(seq_len)
        scores[:, (places >= ends) | (places <= own - (window or seq_len))] = float("-inf")
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, query_len, 1)], dim=-1)
        weights = scores.softmax(dim=-1)[..., :seq_len]
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
        magnitudes.append(torch.einsum("hqk,khd->qhd", weights, values.abs()))
        row += query_len
    return torch.cat(outputs), torch.cat(magnitudes)


def assert_right(case: PagedBatch, window: int | None = None, threads: int = 2, **options: Any) -> None:
    actual = computed(case, window, threads, **options)
    output, magnitude = exact(case, window, **options)
    assert actual.dtype is case.query.dtype and actual.shape == output.shape
    # Written so that NaN is a difference.
    assert ((actual.double() - output).abs() <= UNITS[actual.dtype] * magnitude).all()


@pytest.mark.parametrize("window", [None, 1, 31, 129, 5000])
def test_steps_of_every_kind(dtype: torch.dtype, window: int | None) -> None:
    for lengths in (
        [(1, 1)],
        [(2, 2), (1, 257), (5, 33)],
        [(30, 300), (33, 33), (1, 129), (1, 16)],
        [(150, 1000), (1, 700)],
    ):
        for head_dim in (64, 40):
            assert_right(make_batch(lengths, head_dim=head_dim, dtype=dtype), window)


@pytest.mark.parametrize(
    ("head_dim", "value_dim"), [(1, 3), (7, 33), (32, 32), (80, 80), (128, 128), (192, 128), (256, 64), (512, 512)]
)
def test_heads_of_any_size(dtype: torch.dtype, head_dim: int, value_dim: int) -> None:
    case = make_batch([(60, 150), (1, 200)], head_dim=head_dim, value_dim=value_dim, dtype=dtype)
    assert_right(case, scaling=head_dim**-0.5)
    assert_right(case, 70, scaling=head_dim**-0.5)


@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (10, 1), (40, 40), (200, 1)])
def test_any_number_of_heads(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    case = make_batch([(20, 150), (1, 300), (1, 40)], num_heads=heads[0], num_kv_heads=heads[1], dtype=dtype)
    for threads in (1, SPLIT_AMONG):
        assert_right(case, threads=threads)


@pytest.mark.parametrize("block_size", [1, 7, 16, 300])
def test_blocks_of_any_size(dtype: torch.dtype, block_size: int) -> None:
    assert_right(make_batch([(20, 150), (1, 290)], block_size=block_size, dtype=dtype))


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 3.0},
        {"softcap": 50.0},
        {"sinks": torch.linspace(-1.0, 9.0, 6)},
        {"softcap": 3.0, "sinks": torch.linspace(-1.0, 2.0, 6)},
    ],
    ids=["softcap", "large softcap", "sinks", "both"],
)
def test_softcap_and_sinks(dtype: torch.dtype, options: dict[str, Any]) -> None:
    case = make_batch([(40, 150), (1, 700), (1, 20)], dtype=dtype)
    for threads in (1, SPLIT_AMONG):
        assert_right(case, threads=threads, **options)
        assert_right(case, 100, threads=threads, **options)


@pytest.mark.parametrize("window", [None, 1, 31, 5000])
def test_tokens_that_see_later_ones(dtype: torch.dtype, window: int | None) -> None:
    groups = [[(0, 2)], [(250, 300)], [(81, 90), (90, 128)], [(700, 860), (861, 870), (990, 1000)]]
    case = make_batch([(2, 2), (30, 300), (48, 129), (150, 1000)], groups=groups, dtype=dtype)
    assert_right(case, window)


def test_a_decode_is_divided_among_threads(dtype: torch.dtype) -> None:
    case = make_batch([(1, 3000)], dtype=dtype)
    for threads in (1, 2, 3, 8):
        plan = planned(case, threads=threads).on_c_side
        assert plan.num_tasks == 1 if threads == 1 else plan.num_tasks >= 2 * threads
        assert plan.num_merged == (threads > 1)
        assert_right(case, threads=threads)


@pytest.mark.parametrize("window", [None, 40, 700])
def test_prefixes_that_requests_share_are_read_once(dtype: torch.dtype, window: int | None) -> None:
    lengths = [(1, 900), (1, 820), (30, 870), (1, 801), (1, 500), (1, 480), (1, 30)]
    case = make_batch(lengths, shared=[(range(4), 50), ((4, 5), 29)], head_dim=64, dtype=dtype)
    for threads in (1, SPLIT_AMONG):
        plan = planned(case, window, threads).on_c_side
        if window is None:
            assert (plan.num_prefixes, plan.num_listed) == (2, 35)
        assert_right(case, window, threads, softcap=5.0, sinks=torch.linspace(-1.0, 2.0, 6))


def test_what_is_shared_is_no_task_of_its_requests(dtype: torch.dtype) -> None:
    """16 decodes over 1,024 tokens of one prefix go through it as often as one, and not much further."""
    case = make_batch([(1, 1040)] * 16, shared=[(range(16), 64)], dtype=dtype)
    batch = planned(case, threads=1)
    [tasks] = [array for array in batch.arrays if isinstance(array, np.ndarray) and array.shape[1:] == (11,)]
    keys = tasks[: batch.on_c_side.num_tasks, 8:10]
    assert (keys[:, 1] - keys[:, 0]).max() <= 1024
    own = keys[keys[:, 0] >= 1024]
    assert (own[:, 1] - own[:, 0]).sum() <= 16 * 16 * 2


def test_scores_far_apart(dtype: torch.dtype) -> None:
    """The largest score may come at any time, and make all before it vanish."""
    case = make_batch([(40, 700), (1, 900)], dtype=dtype)
    case.query *= 60
    output, magnitude = exact(case)
    assert (
        (computed(case).double() - output).abs() <= 40 * UNITS[torch.float32] * magnitude + UNITS[dtype] * magnitude
    ).all()


def test_scores_so_large_that_their_rounding_is_larger_than_any_exponent(dtype: torch.dtype) -> None:
    case = make_batch([(3, 300), (1, 200)], dtype=dtype)
    case.query *= 1e15
    case.key_cache *= 1e18
    torch.testing.assert_close(computed(case).double(), exact(case)[0], atol=1e-6, rtol=2**-8)


@pytest.mark.parametrize("kv_dtype", LARGEST, ids=str)
@pytest.mark.parametrize("window", [None, 31])
def test_codes_stand_for_what_they_are_multiplied_with(
    dtype: torch.dtype, kv_dtype: torch.dtype, window: int | None
) -> None:
    for lengths in ([(1, 1)], [(2, 2), (1, 257), (5, 33)], [(150, 1000), (1, 700)]):
        for head_dim, value_dim in ((64, 64), (40, 33), (192, 128)):
            case = make_batch(lengths, head_dim=head_dim, value_dim=value_dim, dtype=dtype)
            case.value_cache *= 1e4
            for threads in (1, SPLIT_AMONG):
                assert_right(quantized(case, kv_dtype), window, threads, scaling=head_dim**-0.5)


@pytest.mark.parametrize("kv_dtype", LARGEST, ids=str)
@pytest.mark.parametrize("num_heads", [3, 30])
def test_codes_of_a_prefix_with_softcap_and_sinks(dtype: torch.dtype, kv_dtype: torch.dtype, num_heads: int) -> None:
    lengths = [(1, 900), (1, 820), (30, 870), (1, 500)]
    case = make_batch(lengths, shared=[(range(3), 50)], num_heads=num_heads, num_kv_heads=3, head_dim=64, dtype=dtype)
    options = {"softcap": 5.0, "sinks": torch.linspace(-1.0, 2.0, num_heads)}
    assert_right(quantized(case, kv_dtype), threads=SPLIT_AMONG, **options)


@pytest.mark.parametrize("seed", range(8))
def test_random_steps(dtype: torch.dtype, seed: int) -> None:
    draw = random.Random(seed)
    random.seed(seed)
    num_kv_heads = draw.randint(1, 4)
    lengths = []
    for _ in range(draw.randint(1, 8)):
        query_len = draw.choice([1, 1, 1, draw.randint(2, 64), draw.randint(65, 200)])
        lengths.append((query_len, query_len + draw.choice([0, draw.randint(0, 40), draw.randint(0, 600)])))
    with_prefix = [i for i, (query_len, seq_len) in enumerate(lengths) if seq_len - query_len >= 160]
    case = make_batch(
        lengths,
        num_heads=num_kv_heads * draw.randint(1, 12),
        num_kv_heads=num_kv_heads,
        head_dim=draw.choice([32, 64, 96, 20]),
        dtype=dtype,
        shared=[(with_prefix, 10)] if with_prefix else [],
    )
    if seed % 2:
        case = quantized(case, draw.choice(list(LARGEST)))
    torch.set_num_threads(draw.choice([1, 2, 3]))
    assert_right(case, draw.choice([None, draw.randint(1, 300)]), draw.choice([1, 2, SPLIT_AMONG]))


def test_a_row_does_not_depend_on_what_others_hold(dtype: torch.dtype) -> None:
    case = make_batch([(12, 140), (1, 300)], dtype=dtype)
    expected = computed(case)
    case.query[5, 3, 7] = float("nan")
    table = case.block_tables[1]
    case.key_cache[table] = float("nan")
    case.value_cache[table] = float("nan")
    actual = computed(case)
    assert actual[5, 3].isnan().all() and actual[12].isnan().all()
    actual[5, 3], actual[12] = expected[5, 3], expected[12]
    assert torch.equal(actual, expected)


def test_a_key_that_is_not_a_number_is_seen_by_later_tokens_only(dtype: torch.dtype) -> None:
    case = make_batch([(12, 140)], dtype=dtype)
    expected = computed(case)
    case.key_cache[case.block_tables[0][133 // 16], 133 % 16, 1, 7] = float("nan")
    actual = computed(case)
    assert actual[5:, 3:].isnan().all()
    actual[5:, 3:] = expected[5:, 3:]
    assert torch.equal(actual, expected)


def test_the_same_step_gives_the_same_in_any_number_of_threads(dtype: torch.dtype) -> None:
    case = make_batch([(150, 400), (1, 900), (1, 900)], shared=[((1, 2), 40)], dtype=dtype)
    expected = computed(case)
    for threads in (1, 5):
        torch.set_num_threads(threads)
        assert torch.equal(computed(case), expected)


def test_what_the_kernel_cannot_read_is_refused(dtype: torch.dtype) -> None:
    case = make_batch([(1, 20)], dtype=dtype)
    batch, (query, keys, values) = planned(case), (case.query, case.key_cache, case.value_cache)
    apart = torch.empty(*keys.shape[:2], keys.shape[3], keys.shape[2], dtype=dtype).transpose(2, 3)
    wide = torch.empty(1, 6, 513, dtype=dtype)
    for tensors in (
        (query.half(), keys.half(), values.half()),
        (query.half(), keys, values),
        (query, apart, values),
        (query, keys[:, :8], values),
        (query, keys.to("meta"), values),
        (wide, wide[None], wide[None]),
    ):
        assert not takes(*tensors)
        with pytest.raises(ValueError, match="does not take"):
            attention(*tensors, batch, scaling=1.0)


def test_a_plan_for_another_step_is_refused(dtype: torch.dtype) -> None:
    case, other = make_batch([(1, 20)], dtype=dtype), make_batch([(2, 20)], dtype=dtype)
    with pytest.raises(ValueError, match="planned for 2 tokens in blocks of 16"):
        attention(case.query, case.key_cache, case.value_cache, planned(other), scaling=1.0)
