"""Which blocks of a prompt have to be kept for hits to find the beginnings that its request wants kept.

`columns` are a prompt's blocks, each in all groups: what lookups find there, None where that is nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from .block import KVCacheBlock
from .groups import first_visible_block

Column = Sequence[KVCacheBlock | None]


def blocks_to_keep(
    columns: Sequence[Column], first: int, end: int, windows: Sequence[int | None], block_size: int
) -> list[KVCacheBlock]:
    """Of blocks `[first, end)` what hits need that end within the last one of them, or before it; in the order in which
    they are of use.
    """
    first_needed = _first_needed(end, windows, block_size)
    return [
        block
        for index in range(first, min(end, len(columns)))
        for block, needed in zip(columns[index], first_needed, strict=True)
        if block is not None and index >= needed
    ]


def num_kept_tokens(columns: Sequence[Column], num_tokens: int, windows: Sequence[int | None], block_size: int) -> int:
    """The longest beginning of a prompt's first `num_tokens` tokens of which all that a hit needs is kept."""
    end = min(len(columns), -(-num_tokens // block_size))
    for group, window in enumerate(windows):
        if window is None:
            end = next((index for index in range(end) if not _is_kept(columns[index][group])), end)
    while not all(
        _is_kept(columns[index][group])
        for group, first in enumerate(_first_needed(end, windows, block_size))
        if windows[group] is not None
        for index in range(first, end)
    ):
        end -= 1
    return min(num_tokens, end * block_size)


def _first_needed(end: int, windows: Sequence[int | None], block_size: int) -> list[int]:
    """Of each group, the first block."""
    return [first_visible_block(window, (end - 1) * block_size, block_size) for window in windows]


def _is_kept(block: KVCacheBlock | None) -> bool:
    return block is not None and block.keep is not None
