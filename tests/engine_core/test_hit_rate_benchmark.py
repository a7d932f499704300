"""An excerpt of a public trace through the real scheduler and pool: hits by policy, and of who knows the future."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.hit_rate import GOLDEN, block_trace_rows
from benchmarks.trace_replay import (
    TraceRequest,
    optimal_hits,
    read_jsonl,
    replay,
    requests_of_blocks,
    requests_of_text,
)

EXCERPT = Path(__file__).parent.parent / "data" / "traces" / "mooncake_conversation_excerpt.jsonl.gz"


@pytest.fixture(scope="module")
def block_ids() -> list[list[int]]:
    return [record["hash_ids"] for record in read_jsonl(EXCERPT)]


def lru_hits(block_ids: list[list[int]], num_blocks: int) -> int:
    """With a list, the next to go first."""
    cached: list[int] = []
    num_hits = 0
    for ids in block_ids:
        num_hits += next((i for i, block in enumerate(ids) if block not in cached), len(ids))
        cached = [block for block in cached if block not in ids] + ids[::-1]
        cached = cached[-num_blocks:]
    return num_hits


def test_lru_finds_what_a_list_finds(block_ids: list[list[int]]):
    excerpt = block_ids[:400]
    for num_blocks in (260, 600):
        totals = replay(requests_of_blocks(excerpt, 1), num_blocks, 1, "lru")
        assert totals.num_cached_blocks == lru_hits(excerpt, num_blocks)


@pytest.mark.parametrize(("num_blocks", "golden"), [(500, 1555), (2000, 1909)])
def test_frequency_lies_between_lru_and_the_optimum(block_ids: list[list[int]], num_blocks: int, golden: int):
    requests = requests_of_blocks(block_ids, 1)
    lru, frequency = (
        replay(requests, num_blocks, 1, policy).num_cached_blocks
        for policy in ("lru", "frequency")  # type: ignore[arg-type]
    )
    assert lru == golden
    assert 1.15 * lru < frequency < optimal_hits(block_ids, num_blocks)


def test_with_room_for_all_every_policy_finds_all(block_ids: list[list[int]]):
    excerpt = block_ids[:300]
    num_distinct = len(set().union(*excerpt))
    most = sum(map(len, excerpt)) - num_distinct
    assert optimal_hits(excerpt, num_distinct) == most
    for policy in ("lru", "unhashed_first", "frequency"):
        totals = replay(requests_of_blocks(excerpt, 2), num_distinct, 2, policy)  # type: ignore[arg-type]
        assert totals.num_cached_blocks == most


def test_the_optimum_keeps_what_comes_again_soonest():
    assert optimal_hits([[1], [2], [3], [1], [2]], 2) == 1
    assert optimal_hits([[1, 2], [3], [1, 2]], 2) == 1, "the deeper one makes room"


def test_requests_that_overlap_are_all_served(block_ids: list[list[int]]):
    excerpt = block_ids[:200]
    totals = replay(requests_of_blocks(excerpt, 1), 1_500, 1, "frequency", max_num_seqs=4)
    assert totals.num_prompt_blocks == sum(map(len, excerpt))
    assert 0 < totals.num_cached_blocks <= sum(map(len, excerpt)) - len(set().union(*excerpt))


def test_text_continues_the_answer_to_the_token():
    records = [
        {"input": "one two three", "output": "four five"},
        {"input": "one two three four five six", "output": ""},
    ]
    words = {word: number for number, word in enumerate("one two three four five six".split(), 1)}
    requests = requests_of_text(records, lambda text: [words[word] for word in text.split()])
    assert requests == [TraceRequest([1, 2, 3], [4, 5]), TraceRequest([1, 2, 3, 4, 5, 6])]
    # The last token of an answer is never computed.
    assert replay(requests, 10, 3, "lru", match_unit="token").num_cached_tokens == 4
    assert replay(requests, 10, 3, "lru", match_unit="block").num_cached_tokens == 3


def test_a_golden_figure_that_is_missed_ends_the_program(monkeypatch: pytest.MonkeyPatch):
    name = EXCERPT.name.removeprefix("mooncake_")
    monkeypatch.setitem(GOLDEN, name, (41_702, 30_634, {500: 3.7}))
    rows = block_trace_rows(EXCERPT, ["lru"], [500], 1)
    assert rows[0]["golden"] == 3.7 and rows[0]["lru"] < rows[0]["optimum"]
    monkeypatch.setitem(GOLDEN, name, (41_702, 30_634, {500: 5.0}))
    with pytest.raises(SystemExit, match="500 blocks, LRU"):
        block_trace_rows(EXCERPT, ["lru"], [500], 1)
