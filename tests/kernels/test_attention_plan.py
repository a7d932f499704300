"""Which tiles a step becomes: every token meets every key it sees exactly once, and the device has enough to do."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from kernels.attention_plan import AttentionPlan, PlanLimits, plan_attention
from kernels.attention_tiles import TILE_FIELDS, LayerHeads
from kernels.shared_prefixes import ReadingCosts, SharedPrefix, shared_prefixes

HEADS = LayerHeads(32, 8, 128, 128, torch.bfloat16)
H100 = PlanLimits(num_sms=132)
BLOCK_SIZE = 16


def tables_for(seq_lens: Sequence[int], shared: Sequence[tuple[Sequence[int], int]] = ()) -> np.ndarray:
    """Block tables of blocks of their own, but for what is shared, with noise behind their ends."""
    width = max(-(-seq_len // BLOCK_SIZE) for seq_len in seq_lens)
    tables = np.arange(len(seq_lens) * width).reshape(len(seq_lens), width) + 1000
    for requests, count in shared:
        tables[list(requests), :count] = tables[requests[0], :count]
    for table, seq_len in zip(tables, seq_lens):
        table[-(-seq_len // BLOCK_SIZE) :] = 7
    return tables


def plan(
    lengths: Sequence[tuple[int, int]],
    *,
    shared: Sequence[tuple[Sequence[int], int]] = (),
    heads: LayerHeads = HEADS,
    limits: PlanLimits = H100,
    sliding_window: int | None = None,
) -> AttentionPlan:
    query_lens, seq_lens = (np.array(column, dtype=np.int64) for column in zip(*lengths, strict=True))
    return plan_attention(
        np.concatenate([[0], np.cumsum(query_lens)]),
        seq_lens,
        hidden(tables_for(seq_lens.tolist(), shared), lengths, sliding_window),
        BLOCK_SIZE,
        heads,
        limits,
        sliding_window=sliding_window,
    )


def hidden(tables: np.ndarray, lengths: Sequence[tuple[int, int]], window: int | None) -> np.ndarray:
    """These tables as a KV cache group with such a window has them: with 0 for blocks that nobody sees."""
    tables = tables.copy()
    for table, (query_len, seq_len) in zip(tables, lengths, strict=True):
        table[: first_seen(seq_len - query_len, window) // BLOCK_SIZE] = 0
    return tables


def first_seen(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position + 1 - window)


def tiles_of(planned: AttentionPlan) -> list[dict[str, int]]:
    return [dict(zip(TILE_FIELDS, row, strict=True)) for row in [*planned.wide.tolist(), *planned.narrow.tolist()]]


def tokens_of(tile: dict[str, int], planned: AttentionPlan) -> list[int]:
    places = range(tile["first"], tile["first"] + tile["num_tokens"])
    return planned.listed_tokens[places].tolist() if tile["is_listed"] else list(places)


@pytest.mark.parametrize("window", [None, 1, 40, 150])
@pytest.mark.parametrize("seed", range(12))
def test_every_token_meets_every_key_it_sees_once(seed: int, window: int | None) -> None:
    draw = random.Random(seed)
    lengths = []
    for _ in range(draw.randint(1, 12)):
        seq_len = draw.randint(1, 300)
        lengths.append((draw.choice([1, 1, draw.randint(1, seq_len)]), seq_len))
    cached = [(seq_len - query_len) // BLOCK_SIZE for query_len, seq_len in lengths]
    chosen = sorted(draw.sample(range(len(lengths)), draw.randint(1, len(lengths))))
    shared = [(chosen, min(cached[request] for request in chosen))]
    heads = LayerHeads(*draw.choice([(4, 4), (6, 2), (8, 1)]), 32, 32, torch.bfloat16)
    limits = PlanLimits(draw.choice([1, 20, 500]), draw.choice([1, 64, 1000]), prefix_overhead_bytes=0)
    planned = plan(lengths, shared=shared, heads=heads, limits=limits, sliding_window=window)

    covered: Counter[tuple[int, int]] = Counter()
    slots: dict[int, list[int]] = {}
    positions = [p for query_len, seq_len in lengths for p in range(seq_len - query_len, seq_len)]
    owners = [request for request, (query_len, _) in enumerate(lengths) for _ in range(query_len)]
    tables = hidden(tables_for([seq_len for _, seq_len in lengths], shared), lengths, window)
    for tile in tiles_of(planned):
        for token in tokens_of(tile, planned):
            if tile["slot"] >= 0:
                slots.setdefault(token, []).append(tile["slot"])
            else:
                assert tile["num_parts"] == 1 and not tile["is_listed"]
            end = min(tile["key_end"], positions[token] + 1)
            own, used = tables[owners[token]], tables[tile["table_row"]]
            # All parts of a tile are there (see `slots`), so the first may stand for them.
            begin = max(tile["key_begin"], first_seen(positions[token], window))
            for key in range(begin, end) if tile["part"] == 0 else ():
                assert own[key // BLOCK_SIZE] == used[key // BLOCK_SIZE]
                covered[token, key] += 1
    assert covered == Counter(
        (token, key)
        for token, position in enumerate(positions)
        for key in range(first_seen(position, window), position + 1)
    )

    num_parts = {token: count for token, _, count in planned.merged.tolist()}
    assert {token: sorted(found) for token, found in slots.items()} == {t: [*range(n)] for t, n in num_parts.items()}
    rows = [first + part for _, first, count in planned.merged.tolist() for part in range(count)]
    assert rows == list(range(planned.num_parts))
    assert all(planned.first_parts[token] == first for token, first, _ in planned.merged.tolist())


def test_a_long_decode_alone_fills_the_device() -> None:
    planned = plan([(1, 100_000)])
    assert 132 <= len(planned.narrow) * HEADS.num_kv_heads <= 2 * 132 + HEADS.num_kv_heads
    assert planned.merged.tolist() == [[0, 0, len(planned.narrow)]]


def test_a_long_decode_among_short_ones_is_divided_as_its_share_of_the_keys_asks() -> None:
    planned = plan([(1, 500)] * 40 + [(1, 100_000)])
    divided = Counter(tile["table_row"] for tile in tiles_of(planned))
    assert divided[40] > 20 and all(divided[request] == 1 for request in range(40))
    assert [tile["table_row"] for tile in tiles_of(planned)][:20] == [40] * 20


def test_nothing_is_divided_where_there_are_programs_enough_or_keys_are_few() -> None:
    assert plan([(1, 4000)] * 64).num_parts == 0
    assert plan([(4096, 4096)]).num_parts == 0
    assert plan([(1, 256)]).num_parts == 0


def test_decodes_beside_a_chunk_have_tiles_of_their_own_size() -> None:
    planned = plan([(1, 250), (200, 300), (4, 70), (1, 9)])
    assert len(planned.narrow) == 3 and len(planned.wide) == 200 * HEADS.group_size // 128 + 1


def test_long_tiles_come_first() -> None:
    ends = [tile["first"] for tile in tiles_of(plan([(1024, 1024)]))]
    assert ends == sorted(ends, reverse=True)


def test_a_plan_without_block_tables_holds_for_any_lengths() -> None:
    def planned(seq_lens: list[int]) -> AttentionPlan:
        return plan_attention(np.arange(4), np.array(seq_lens), None, BLOCK_SIZE, HEADS, H100)

    bound = planned([8192] * 3)
    assert all(tile["key_begin"] == 0 and tile["key_end"] > 1 << 30 for tile in tiles_of(bound))
    assert np.array_equal(planned([8192] * 3).narrow, bound.narrow)


# Sharing is described as for `tables_for`; here it pays as soon as a key is read less often.
CHEAP = ReadingCosts(kv_bytes=100, part_bytes=1, tile_queries=32, overhead_bytes=0)


def found(
    lengths: Sequence[tuple[int, int]],
    shared: Sequence[tuple[Sequence[int], int]],
    costs: ReadingCosts = CHEAP,
    num_tiles: Sequence[int] | None = None,
    sliding_window: int | None = None,
) -> list[tuple[list[int], int]]:
    query_lens, seq_lens = (np.array(column, dtype=np.int64) for column in zip(*lengths, strict=True))
    prefixes: list[SharedPrefix] = shared_prefixes(
        *(hidden(tables_for(seq_lens.tolist(), shared), lengths, sliding_window), seq_lens, query_lens, BLOCK_SIZE),
        costs=costs,
        num_tiles=np.ones(len(lengths), dtype=np.int64) if num_tiles is None else np.array(num_tiles),
        sliding_window=sliding_window,
    )
    return sorted((prefix.requests.tolist(), prefix.num_tokens // BLOCK_SIZE) for prefix in prefixes)


def test_what_is_shared_is_found_to_its_last_block() -> None:
    for count in (1, 31, 32, 33, 96, 97, 200):
        assert found([(1, 4000)] * 3, [((0, 2), count)]) == [([0, 2], count)]
    assert found([(1, 4000)] * 3, []) == []


def test_only_whole_blocks_before_the_steps_tokens_are_shared() -> None:
    # All of these tables are the same, noise behind their ends included.
    assert found([(1, 65), (2, 80), (1, 64)], [((0, 1, 2), 4)]) == [([0, 1, 2], 3)]
    assert found([(1, 16), (1, 16)], [((0, 1), 1)]) == []


def test_a_fork_with_more_behind_it_is_followed() -> None:
    lengths = [(1, 800)] * 6
    # The last three share a little with the first three, and much with each other.
    assert found(lengths, [(range(6), 2), ((3, 4, 5), 40)]) == [([3, 4, 5], 40)]
    assert found(lengths, [(range(6), 2), ((0, 1, 2), 30), ((3, 4, 5), 40)]) == [([0, 1, 2], 30), ([3, 4, 5], 40)]
    assert found(lengths, [(range(6), 38), ((3, 4, 5), 40)]) == [([0, 1, 2, 3, 4, 5], 38)]


def test_it_is_used_only_where_fewer_bytes_are_read() -> None:
    lengths, shared = [(1, 800)] * 4, [(range(4), 10)]
    saved = 3 * 10 * BLOCK_SIZE * CHEAP.kv_bytes
    for part_bytes, overhead_bytes, is_used in (
        (saved // 4 - 1, 0, True),
        (saved // 4, 0, False),
        (0, saved - 1, True),
        (0, saved, False),
    ):
        costs = ReadingCosts(CHEAP.kv_bytes, part_bytes, 32, overhead_bytes)
        assert bool(found(lengths, shared, costs)) == is_used
    # Whoever fills tiles alone saves nothing by sharing them.
    assert found([(64, 800)] * 2, [(range(2), 10)], num_tiles=[2, 2]) == []


def test_a_window_that_does_not_reach_the_prefix_leaves_nothing_to_share() -> None:
    lengths, shared = [(1, 800)] * 4, [(range(4), 10)]
    assert found(lengths, shared, sliding_window=640) == []
    assert found(lengths, shared, sliding_window=641) == [([0, 1, 2, 3], 10)]


def test_blocks_that_nobody_sees_are_not_shared() -> None:
    """Whatever their tables say of them, which is the same."""
    assert found([(1, 800), (1, 800), (1, 900)], [], sliding_window=100) == []
    # Nor does anyone share a window's beginning with a request that sees it no more.
    lengths, shared = [(1, 800), (1, 810), (1, 830), (1, 803), (1, 830)], [(range(5), 49)]
    assert found(lengths, shared, sliding_window=100) == [([0, 3], 49), ([2, 4], 49)]


def test_random_tables_give_true_prefixes_of_different_requests() -> None:
    for _ in range(50):
        num_requests = random.randint(1, 9)
        lengths = [(1, random.randint(1, 200)) for _ in range(num_requests)]
        shared = []
        for _ in range(3):
            requests = sorted(random.sample(range(num_requests), random.randint(1, num_requests)))
            shared.append((requests, min((lengths[r][1] - 1) // BLOCK_SIZE for r in requests)))
        tables = tables_for([seq_len for _, seq_len in lengths], shared)
        prefixes = found(lengths, shared)
        members = [request for requests, _ in prefixes for request in requests]
        assert len(members) == len(set(members))
        for requests, count in prefixes:
            assert len(requests) > 1 and count * BLOCK_SIZE < min(lengths[request][1] for request in requests)
            assert (tables[requests, :count] == tables[requests[0], :count]).all()
