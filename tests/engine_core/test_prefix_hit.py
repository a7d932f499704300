"""Hits where layers see only a window: what has to be there, and where they end."""

from __future__ import annotations

import itertools

import pytest

from engine_core.kv_cache import KVCacheBlock
from engine_core.kv_cache.groups import first_visible_block, longest_sequence, most_blocks
from engine_core.kv_cache.prefix_hit import PrefixHit, Tail, find_hit
from engine_core.kv_cache.prefix_tree import PrefixNode

B = 4


def node(held: tuple[bool, ...]) -> PrefixNode:
    """Of which the groups of `held` have a block."""
    made = PrefixNode(None, b"", b"", len(held))
    made.copies = [KVCacheBlock(0) if has else None for has in held]
    return made


def longest(held: list[tuple[bool, ...]], num_tokens: int, windows: list[int | None], tails: dict[int, int]) -> int:
    """By trying every end, from the longest on. A tail behind whole blocks can be cut short."""

    def is_there(end: int, num_whole: int) -> bool:
        return all(
            held[index][group]
            for group, window in enumerate(windows)
            for index in range(first_visible_block(window, end, B), num_whole)
        )

    for end in range(num_tokens - 1, -1, -1):
        num_whole, rest = divmod(end, B)
        if end == num_tokens - 1 and num_tokens == len(held) * B and is_there(end, len(held)):
            return end
        if num_whole <= len(held) and is_there(end, num_whole) and rest <= tails.get(num_whole, 0):
            return end
    return 0


def hit_of(
    held: list[tuple[bool, ...]], num_tokens: int, windows: list[int | None], tails: dict[int, int]
) -> PrefixHit:
    def find_tail(num_whole: int) -> Tail | None:
        num_slots = min(tails.get(num_whole, 0), num_tokens - 1 - num_whole * B)
        return Tail([KVCacheBlock(9)] * len(windows), num_slots, b"") if num_slots > 0 else None

    return find_hit([node(groups) for groups in held], num_tokens, windows, B, find_tail)


@pytest.mark.parametrize("windows", [[None], [1], [5], [6], [None, 5], [3, 9], [None, 4, 13]])
def test_the_hit_is_the_longest_that_every_group_has(windows: list[int | None]):
    for num_blocks in range(5):
        states = list(itertools.product(*[itertools.product([True, False], repeat=len(windows))] * num_blocks))
        for held in states[:: max(1, len(states) // 300)]:
            for num_tokens in (num_blocks * B, num_blocks * B + 3) if num_blocks else (3,):
                for tails in ({}, {num_blocks: 2}, {1: 3, 2: 1}):
                    hit = hit_of(list(held), num_tokens, windows, tails)
                    assert hit.num_tokens == longest(list(held), num_tokens, windows, tails), (held, num_tokens, tails)
                    for group, window in enumerate(windows):
                        first = first_visible_block(window, hit.num_tokens, B)
                        assert hit.blocks[group][:first] == [None] * min(first, hit.num_whole_blocks)
                        assert None not in hit.blocks[group][first:], "all that the tokens to come see"


def test_a_window_needs_the_tokens_before_the_end_of_the_hit_only():
    held = [(False,), (False,), (True,), (True,)]
    assert hit_of(held, 20, [6], {}).num_tokens == 16
    assert hit_of(held, 20, [9], {}).num_tokens == 16
    assert hit_of(held, 20, [10], {}).num_tokens == 0, "the ninth token before the end is gone"


@pytest.mark.parametrize("window", [1, 2, 4, 5, 8, 9])
@pytest.mark.parametrize("max_step_tokens", [1, 3, 4, 11])
def test_a_sequence_never_holds_more_than_is_reckoned_with(window: int, max_step_tokens: int):
    for num_tokens in range(1, 60):
        for chunk in range(1, max_step_tokens + 1):
            held = max(
                -(-min(start + chunk, num_tokens) // B) - first_visible_block(window, start, B)
                for start in range(0, num_tokens, chunk)
            )
            assert held <= most_blocks([window], num_tokens, B, max_step_tokens)


def test_the_longest_sequence_of_a_pool():
    assert longest_sequence([None], 10, B, 8, 1000) == 40
    assert longest_sequence([None], 10, B, 8, 39) == 39
    assert longest_sequence([5], 4, B, 1, 1000) == 1000, "a window goes on for ever"
    assert longest_sequence([None, 5], 10, B, 1, 1000) == 32, "eight blocks, and never more than two"
    assert longest_sequence([None, 5], 1, B, 1, 1000) == 0
