"""How many blocks a sequence needs where some layers see only a window of it.

Layers with one window share block tables: they are a KV cache group. All groups take their blocks from one pool, and a
block holds `block_size` tokens of one group. A request has a table in every group, all of the same length; what no
token to come can see is given back. The idea is that of vLLM's hybrid allocator.
"""

from __future__ import annotations

from collections.abc import Sequence


def first_visible_block(window: int | None, num_tokens: int, block_size: int) -> int:
    """The first block that tokens from position `num_tokens` on still see."""
    return 0 if window is None else max(0, num_tokens - window + 1) // block_size


def most_blocks(windows: Sequence[int | None], num_tokens: int, block_size: int, max_step_tokens: int) -> int:
    """Most blocks, of all groups together, that a sequence of `num_tokens` holds at a time.

    A step of `max_step_tokens` tokens needs slots for all of them and for what the first of them sees.
    """
    num_blocks = -(-num_tokens // block_size)
    total = 0
    for window in windows:
        if window is None:
            total += num_blocks
        else:
            # Window and step begin and end anywhere in a block.
            total += min(num_blocks, (window - 1 + max_step_tokens + block_size - 2) // block_size + 1)
    return total


def longest_sequence(
    windows: Sequence[int | None], num_blocks: int, block_size: int, max_step_tokens: int, limit_tokens: int
) -> int:
    """How many tokens, at most `limit_tokens`, a sequence can have that holds at most `num_blocks` at a time."""
    if most_blocks(windows, limit_tokens, block_size, max_step_tokens) <= num_blocks:
        return limit_tokens
    low, high = 0, limit_tokens // block_size
    while low < high:
        middle = (low + high + 1) // 2
        if most_blocks(windows, middle * block_size, block_size, max_step_tokens) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low * block_size
