"""`paged_attention` and `write_kv` against a float64 reference, over every kind of batch the scheduler makes."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

import kernels.attention
import kernels.attention_metadata
import kernels.paged_attention
from kernels.attention_metadata import AttentionMetadata
from kernels.attention_tiles import LayerHeads
from kernels.paged_attention import paged_attention
from kernels.write_kv import write_kv

from .reference import reference_attention
from .tensors import poisoned

BLOCK_SIZE = 16
HEAD_DIM = 32
CPU = torch.device("cpu")

# (query_len, seq_len) of each request
BATCHES = {
    "one token": [(1, 1)],
    "whole prompts": [(15, 15), (16, 16), (17, 17), (32, 32)],
    "decodes of equal length": [(1, 40), (1, 40), (1, 40)],
    "decodes of any length": [(1, 1), (1, 17), (1, 200), (1, 33), (1, 150), (1, 16)],
    "chunks behind a prefix": [(16, 32), (15, 31), (1, 16), (7, 64)],
    "everything at once": [(1, 90), (20, 20), (5, 37), (1, 3), (33, 97)],
}
# and positions [start, end) of some, which see each other
GROUPS = {
    "a group by itself": [(20, 20, [(0, 20)])],
    "a group among other tokens": [(40, 40, [(3, 30)])],
    "two groups side by side": [(50, 50, [(3, 20), (20, 49)])],
    "a group whose head is cached": [(12, 52, [(10, 45)])],
    "the last of a group, all else cached": [(1, 48, [(20, 48)]), (1, 30, [])],
    "groups and strangers": [(1, 90, []), (30, 60, [(31, 58)]), (20, 20, []), (45, 47, [(0, 9), (10, 47)]), (1, 5, [])],
}
HEADS = {"MHA": (4, 4), "GQA": (6, 2), "MQA": (4, 1)}
VARIANTS = {
    "plain": {},
    "window 1": {"sliding_window": 1},
    "window 24": {"sliding_window": 24},
    "window 4096": {"sliding_window": 4096},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "softcap, window and sinks": {"softcap": 3.0, "sliding_window": 24, "sinks": True},
}


@dataclass
class Case:
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: list[list[int]]
    query_lens: list[int]
    seq_lens: list[int]
    visible_to: list[int] | None
    metadata: AttentionMetadata


def make_case(
    batch: list[tuple[int, int]],
    num_heads: int,
    num_kv_heads: int,
    dtype: torch.dtype,
    seed: int,
    groups: list[list[tuple[int, int]]] | None = None,
) -> Case:
    """Requests in scattered blocks of a pool that holds NaN wherever none of them has a token.

    The prefix is in the cache already; this step's keys and values are not. `groups` are each request's positions that
    see each other.
    """
    shuffle, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    query_lens = [query_len for query_len, _ in batch]
    seq_lens = [seq_len for _, seq_len in batch]
    needed = [math.ceil(seq_len / BLOCK_SIZE) for seq_len in seq_lens]
    num_blocks = sum(needed) + 3
    free = list(range(num_blocks - 1))  # the last block, slot −1, belongs to nobody
    shuffle.shuffle(free)
    block_tables = [[free.pop() for _ in range(count)] for count in needed]

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    cache_shape = (num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM)
    key_cache, value_cache = (poisoned(*cache_shape, dtype=dtype) for _ in range(2))
    slots: list[int] = []
    for table, query_len, seq_len in zip(block_tables, query_lens, seq_lens, strict=True):
        for position in range(seq_len):
            block, offset = table[position // BLOCK_SIZE], position % BLOCK_SIZE
            if position < seq_len - query_len:
                key_cache[block, offset] = noise(num_kv_heads, HEAD_DIM)
                value_cache[block, offset] = noise(num_kv_heads, HEAD_DIM)
            else:
                slots.append(block * BLOCK_SIZE + offset)

    visible_to = None
    if groups is not None:
        visible_to = [
            next((end for start, end in own if start <= position < end), position + 1)
            for (query_len, seq_len), own in zip(batch, groups, strict=True)
            for position in range(seq_len - query_len, seq_len)
        ]

    padded_tables = np.zeros((len(batch), max(needed)), dtype=np.int64)
    for row, table in zip(padded_tables, block_tables, strict=True):
        row[: len(table)] = table
    metadata = AttentionMetadata(
        query_start_loc=np.concatenate([[0], np.cumsum(query_lens)]),
        seq_lens=np.array(seq_lens),
        block_tables=padded_tables,
        slot_mapping=np.array(slots),
        block_size=BLOCK_SIZE,
        dtype=dtype,
        device=CPU,
        visible_to=None if visible_to is None else np.array(visible_to),
    )
    num_tokens = sum(query_lens)
    return Case(
        query=noise(num_tokens, num_heads, HEAD_DIM),
        key=noise(num_tokens, num_kv_heads, HEAD_DIM),
        value=noise(num_tokens, num_kv_heads, HEAD_DIM),
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=block_tables,
        query_lens=query_lens,
        seq_lens=seq_lens,
        visible_to=visible_to,
        metadata=metadata,
    )


@pytest.fixture
def torch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is no compiler."""
    monkeypatch.setattr(kernels.attention, "library", lambda dtype: None)


@pytest.fixture(params=["kernel", "torch"])
def both(request: pytest.FixtureRequest) -> None:
    if request.param == "torch":
        request.getfixturevalue("torch_only")
    elif not kernels.attention.is_available(torch.float32):
        pytest.skip("no compiler")


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("batch", BATCHES)
def test_equals_the_reference(batch: str, heads: str, variant: str) -> None:
    check(BATCHES[batch], *HEADS[heads], torch.float32, variant, tolerance=2e-5)


@pytest.mark.usefixtures("torch_only")
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_chunk_of_several_tiles_equals_the_reference(variant: str) -> None:
    check([(530, 600), (1, 12)], *HEADS["MQA"], torch.float32, variant, tolerance=2e-5)


@pytest.mark.usefixtures("torch_only")
@pytest.mark.parametrize("variant", ["softcap", "sinks", "softcap, window and sinks"])
@pytest.mark.parametrize("batch", ["whole prompts", "everything at once"])
def test_scores_in_parts_equal_the_reference(batch: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.paged_attention, "_MAX_SCORES", 7 * 6 * 32)
    check(BATCHES[batch], *HEADS["GQA"], torch.float32, variant, tolerance=2e-5)


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("batch", BATCHES)
def test_equals_the_reference_in_bfloat16(batch: str, variant: str) -> None:
    check(BATCHES[batch], *HEADS["GQA"], torch.bfloat16, variant, tolerance=3e-2)


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", GROUPS)
def test_groups_equal_the_reference(name: str, variant: str) -> None:
    check_groups(GROUPS[name], "GQA", torch.float32, variant, tolerance=2e-5)


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("variant", ["plain", "window 24", "softcap"])
@pytest.mark.parametrize("name", GROUPS)
def test_groups_equal_the_reference_in_bfloat16(name: str, variant: str) -> None:
    check_groups(GROUPS[name], "GQA", torch.bfloat16, variant, tolerance=3e-2)


@pytest.mark.usefixtures("torch_only")
@pytest.mark.parametrize("variant", ["plain", "window 24", "softcap, window and sinks"])
def test_groups_of_several_tiles_and_tiles_of_several_groups_equal_the_reference(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels.attention_metadata, "_MAX_TILE_QUERIES", 16)
    for batch in GROUPS.values():
        check_groups(batch, "MQA", torch.float32, variant, tolerance=2e-5)


@pytest.mark.skipif(not kernels.attention.is_available(torch.float32), reason="no compiler")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_the_kernel_computes_what_it_can(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    compute = kernels.attention.attention

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(args)
        return compute(*args, **kwargs)

    monkeypatch.setattr(kernels.attention, "attention", counted)
    for variant in VARIANTS:
        check(BATCHES["everything at once"], *HEADS["GQA"], dtype, variant, tolerance=3e-2)
    assert len(calls) == (0 if dtype is torch.float16 else len(VARIANTS))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_reference_for_random_batches(variant: str, seed: int) -> None:
    draw = random.Random(seed)
    batch = []
    for _ in range(draw.randint(1, 8)):
        seq_len = draw.randint(1, 150)
        batch.append((draw.choice([1, 1, draw.randint(1, seq_len)]), seq_len))
    check(batch, *draw.choice(list(HEADS.values())), torch.float32, variant, tolerance=2e-5, seed=seed)


@pytest.mark.usefixtures("torch_only")
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 40))])
@pytest.mark.parametrize("variant", ["plain", "window 24", "softcap, window and sinks"])
def test_random_groups_equal_the_reference(variant: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(kernels.attention_metadata, "_MAX_TILE_QUERIES", draw.choice([1, 7, 16, 512]))
    batch = []
    for _ in range(draw.randint(1, 5)):
        seq_len = draw.randint(1, 100)
        borders = sorted(draw.sample(range(seq_len + 1), k=draw.randint(0, min(6, seq_len))))
        groups = list(zip(borders[::2], borders[1::2]))
        batch.append((draw.choice([1, draw.randint(1, seq_len), seq_len]), seq_len, groups))
    check_groups(batch, draw.choice(list(HEADS)), torch.float32, variant, tolerance=2e-5, seed=seed)


def check_groups(
    batch: list[tuple[int, int, list[tuple[int, int]]]],
    heads: str,
    dtype: torch.dtype,
    variant: str,
    *,
    tolerance: float,
    seed: int = 0,
) -> None:
    lengths = [(query_len, seq_len) for query_len, seq_len, _ in batch]
    groups = [own for _, _, own in batch]
    check(lengths, *HEADS[heads], dtype, variant, tolerance=tolerance, seed=seed, groups=groups)


def check(
    batch: list[tuple[int, int]],
    num_heads: int,
    num_kv_heads: int,
    dtype: torch.dtype,
    variant: str,
    *,
    tolerance: float,
    seed: int = 0,
    groups: list[list[tuple[int, int]]] | None = None,
) -> None:
    case = make_case(batch, num_heads, num_kv_heads, dtype, seed, groups)
    options = dict(VARIANTS[variant])
    if options.pop("sinks", False):
        options["sinks"] = torch.linspace(-1.0, 2.0, num_heads)
    scaling = HEAD_DIM**-0.5

    write_kv(case.key, case.value, case.key_cache, case.value_cache, case.metadata.slots)
    actual = paged_attention(case.query, case.key_cache, case.value_cache, case.metadata, scaling=scaling, **options)
    expected = reference_attention(
        case.query,
        case.key_cache,
        case.value_cache,
        case.block_tables,
        case.query_lens,
        case.seq_lens,
        scaling=scaling,
        visible_to=case.visible_to,
        **options,
    )
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


def test_a_whole_prompt_hit_reads_the_cached_last_token() -> None:
    """The one token of such a step goes to slot −1: what is read must be what the cache held, not the new K/V."""
    case = make_case([(1, 32)], 4, 2, torch.float32, seed=3)
    write_kv(case.key, case.value, case.key_cache, case.value_cache, case.metadata.slots)
    cached = paged_attention(case.query, case.key_cache, case.value_cache, case.metadata, scaling=0.2)

    hit = replace(case.metadata, slot_mapping=np.array([-1]))
    write_kv(case.key + 1, case.value + 1, case.key_cache, case.value_cache, hit.slots)
    again = paged_attention(case.query, case.key_cache, case.value_cache, hit, scaling=0.2)
    assert torch.equal(cached, again)
    assert case.key_cache[-1].isnan().all()


def test_of_a_group_that_goes_to_no_slot_the_cached_tokens_are_read() -> None:
    case = make_case([(30, 48)], 4, 2, torch.float32, seed=3, groups=[[(20, 48)]])
    write_kv(case.key, case.value, case.key_cache, case.value_cache, case.metadata.slots)
    cached = paged_attention(case.query, case.key_cache, case.value_cache, case.metadata, scaling=0.2)

    slots = case.metadata.slot_mapping.copy()
    slots[:14] = -1
    hit = replace(case.metadata, slot_mapping=slots)
    key, value = case.key.clone(), case.value.clone()
    key[:14] += 1
    value[:14] += 1
    write_kv(key, value, case.key_cache, case.value_cache, hit.slots)
    again = paged_attention(case.query, case.key_cache, case.value_cache, hit, scaling=0.2)
    assert torch.equal(cached, again)
    assert case.key_cache[-1].isnan().all()


def test_values_may_be_narrower_than_keys() -> None:
    case = make_case([(3, 20), (1, 9)], 4, 2, torch.float32, seed=4)
    write_kv(case.key, case.value, case.key_cache, case.value_cache, case.metadata.slots)
    wide = paged_attention(case.query, case.key_cache, case.value_cache, case.metadata, scaling=0.2)
    narrow = paged_attention(
        case.query, case.key_cache, case.value_cache[..., :16].contiguous(), case.metadata, scaling=0.2
    )
    torch.testing.assert_close(narrow, wide[..., :16])


def test_indices_are_worked_out_once_per_window() -> None:
    metadata = make_case(BATCHES["everything at once"], 4, 2, torch.float32, seed=0).metadata
    assert metadata.tiles(None) is metadata.tiles(None)
    assert metadata.tiles(24) is metadata.tiles(24)
    assert metadata.tiles(None) is not metadata.tiles(24)


@pytest.mark.skipif(not kernels.attention.is_available(torch.float32), reason="no compiler")
def test_the_kernel_is_planned_for_once_per_window_and_kind_of_heads() -> None:
    metadata = make_case(BATCHES["everything at once"], 4, 2, torch.float32, seed=0).metadata
    heads = LayerHeads(4, 2, 32, 32, torch.float32)
    assert metadata.cpu_batch(heads, None) is metadata.cpu_batch(heads, None)
    assert metadata.cpu_batch(heads, None) is not metadata.cpu_batch(heads, 24)
    assert metadata.cpu_batch(heads, None) is not metadata.cpu_batch(replace(heads, num_heads=8), None)


def test_a_window_reads_no_keys_it_cannot_see() -> None:
    metadata = make_case([(1, 200), (10, 200)], 4, 2, torch.float32, seed=0).metadata
    assert sorted(tile.num_keys for tile in metadata.tiles(24)) == [24, 33]


def test_no_tile_parts_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.attention_metadata, "_MAX_TILE_QUERIES", 16)
    groups = [(10, 14), (14, 20), (24, 50), (50, 52)]
    metadata = make_case([(60, 60)], 4, 2, torch.float32, seed=0, groups=[groups]).metadata
    lengths = [tile.num_queries for tile in metadata.tiles(None)]
    # As many of the 16 as end before a group or with it; a group that is longer is a tile of its own.
    assert lengths == [14, 10, 26, 10]
    assert [tile.num_keys for tile in metadata.tiles(None)] == [14, 24, 50, 60]


def test_tokens_without_a_group_are_computed_as_if_there_were_none() -> None:
    lengths, no_groups = [(20, 20), (30, 50), (1, 9)], [[], [(25, 40)], []]
    tiles = make_case(lengths, 4, 2, torch.float32, seed=0, groups=no_groups).metadata.tiles(None)
    assert [tile.query_ends is None for tile in tiles] == [True, False, True]
    assert [tile.is_causal for tile in tiles] == [True, False, False]


@pytest.mark.parametrize(
    ("visible_to", "why"),
    [
        ([1, 2, 3, 4, 7, 7], "not itself"),
        ([1, 2, 4, 5, 6, 7], "beyond the end"),
        ([3, 2, 3, 5, 6, 7], "less than one before"),
        ([1, 2, 3, 5, 6], "not every token"),
    ],
)
def test_what_tokens_see_must_make_sense(visible_to: list[int], why: str) -> None:
    metadata = make_case([(3, 3), (3, 7)], 4, 2, torch.float32, seed=0).metadata
    replace(metadata, visible_to=np.array([1, 3, 3, 6, 6, 7]))
    with pytest.raises(ValueError, match="visible_to"):
        replace(metadata, visible_to=np.array(visible_to))


def test_decodes_share_a_tile_unless_padding_is_dear() -> None:
    metadata = make_case([(1, 300), (1, 290), (1, 20), (1, 30)], 4, 2, torch.float32, seed=0).metadata
    assert [(tile.num_requests, tile.num_keys) for tile in metadata.tiles(None)] == [(2, 300), (2, 30)]


def test_a_tile_gathers_no_more_keys_than_memory_is_kept_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many requests on one long prefix would gather it as many times."""
    monkeypatch.setattr(kernels.attention_metadata, "_MAX_TILE_KEYS", 650)
    metadata = make_case([(1, 300)] * 5 + [(1, 700)], 4, 2, torch.float32, seed=0).metadata
    assert [(t.num_requests, t.num_keys) for t in metadata.tiles(None)] == [(1, 700), (2, 300), (2, 300), (1, 300)]
