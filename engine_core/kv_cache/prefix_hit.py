"""The longest cached prefix of a request: whole blocks, and the beginning of one more.

Where a group has a window, only what the tokens to come see needs to be there, so a hit may go on where blocks were
evicted long before it. It is shortened, then, until every group has the `window - 1` tokens before its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .block import KVCacheBlock
from .block_content import Content
from .groups import first_visible_block
from .prefix_tree import PrefixNode


@dataclass(frozen=True, slots=True)
class Tail:
    """What follows the whole blocks: the first `num_slots` slots of `blocks`, one for each group, are to be copied.

    `content` is what steps that have run wrote there, which may go on differently than the request.
    """

    blocks: Sequence[KVCacheBlock]
    num_slots: int
    content: Content


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """`num_tokens` tokens of a request need not be computed.

    `blocks` are its whole blocks in each group (None where no token to come sees it), `nodes` theirs. If every block of
    the sequence is cached, `num_tokens` is one less than they hold, because the last token's logits are needed.

    A fork may share blocks that have no node. `is_stale`: they are from before a reset.
    """

    nodes: Sequence[PrefixNode]
    blocks: Sequence[Sequence[KVCacheBlock | None]]
    num_tokens: int
    tail: Tail | None = None
    is_stale: bool = False

    @property
    def num_whole_blocks(self) -> int:
        return len(self.blocks[0])

    @property
    def num_copied_tokens(self) -> int:
        return 0 if self.tail is None else self.tail.num_slots

    def touched(self) -> list[KVCacheBlock]:
        return [block for blocks in self.blocks for block in blocks if block is not None]


def find_hit(
    path: Sequence[PrefixNode],
    num_tokens: int,
    windows: Sequence[int | None],
    block_size: int,
    find_tail: Callable[[int], Tail | None],
) -> PrefixHit:
    """The longest hit of a sequence of `num_tokens` tokens that begins with the nodes of `path`.

    `find_tail` says what can be copied behind so many whole blocks. Windows may make the hit lose blocks that an
    evicted one before them is missing from; what is copied counts as there.
    """
    num_whole = num_whole_blocks(path, windows)
    while True:
        furthest = min((num_whole + 1) * block_size - 1, num_tokens - 1)
        blocking = _blocking(path, num_whole, windows, furthest, block_size)
        if blocking is None:
            tail = find_tail(num_whole)
            end = min(num_whole * block_size + (tail.num_slots if tail else 0), num_tokens - 1)
            blocking = _blocking(path, num_whole, windows, end, block_size)
            if blocking is None:
                return _make_hit(path[:num_whole], windows, end, block_size, tail)
        num_whole = blocking


def num_whole_blocks(path: Sequence[PrefixNode], windows: Sequence[int | None]) -> int:
    """How many of the first blocks every group that sees all of them has."""
    num_whole = len(path)
    for group, window in enumerate(windows):
        if window is None:
            missing = (index for index, node in enumerate(path) if node.copies[group] is None)
            num_whole = min(num_whole, next(missing, num_whole))
    return num_whole


def _blocking(
    path: Sequence[PrefixNode], num_whole: int, windows: Sequence[int | None], end: int, block_size: int
) -> int | None:
    """A block that some group lacks, although tokens from `end` on see it: a hit cannot be longer than up to there.

    None if the first `num_whole` blocks will do.
    """
    found: int | None = None
    for group, window in enumerate(windows):
        if window is not None:
            last = (num_whole if found is None else found) - 1
            for index in range(last, first_visible_block(window, end, block_size) - 1, -1):
                if path[index].copies[group] is None:
                    found = index
                    break
    return found


def _make_hit(
    nodes: Sequence[PrefixNode], windows: Sequence[int | None], end: int, block_size: int, tail: Tail | None
) -> PrefixHit:
    blocks: list[list[KVCacheBlock | None]] = []
    for group, window in enumerate(windows):
        first = first_visible_block(window, end, block_size)
        blocks.append([None] * first)
        for node in nodes[first:]:
            copies = node.copies[group]
            blocks[group].append(copies if isinstance(copies, KVCacheBlock) else node.block(group))
    return PrefixHit(nodes, blocks, end, tail)
