"""The blocks of one request."""

from __future__ import annotations

from collections.abc import Sequence

from engine_core.request import Request

from .block import KVCacheBlock
from .prefix_tree import PrefixNode


class BlockTable:
    """The blocks of one request in each KV cache group, in sequence order; append-only until freed.

    The first `num_shared_blocks` of each group came from the cache and are never written. `nodes` are those of the
    first blocks, as far as they can be found by lookups (or are shared). A block that no token to come sees has been
    given back: then it is None in `blocks`, and 0 in `block_tables`.

    Attributes:
        is_registrable: whether what it fills is to be cached. False once another prefix had the hash of one of its
            blocks: those behind it are not cached either.
        is_stale: whether the cache was reset since something of it was computed: nothing of it is to be found.
        num_given_back: of each group, how many blocks.
    """

    __slots__ = (
        "block_tables",
        "blocks",
        "is_registrable",
        "is_stale",
        "nodes",
        "num_given_back",
        "num_shared_blocks",
        "request",
    )

    def __init__(
        self,
        request: Request,
        nodes: Sequence[PrefixNode],
        shared: Sequence[Sequence[KVCacheBlock | None]],
        is_stale: bool = False,
    ) -> None:
        self.request = request
        self.nodes = list(nodes)
        self.blocks = [list(blocks) for blocks in shared]
        self.block_tables = [[0 if block is None else block.block_id for block in blocks] for blocks in shared]
        self.num_given_back = [blocks.count(None) for blocks in self.blocks]
        self.num_shared_blocks = len(self.blocks[0])
        self.is_stale = is_stale
        self.is_registrable = request.write_prefix_cache and not is_stale and len(nodes) == self.num_shared_blocks

    def extend(self, group: int, blocks: Sequence[KVCacheBlock]) -> None:
        self.blocks[group] += blocks
        self.block_tables[group] += [block.block_id for block in blocks]

    def give_back(self, group: int, end: int) -> list[KVCacheBlock]:
        """Take the blocks before block `end` out; the last one first."""
        start = self.num_given_back[group]
        if end <= start:
            return []
        blocks = self.blocks[group][start:end]
        self.blocks[group][start:end] = [None] * len(blocks)
        self.block_tables[group][start:end] = [0] * len(blocks)
        self.num_given_back[group] = end
        return [block for block in reversed(blocks) if block is not None]

    def at(self, index: int) -> list[KVCacheBlock]:
        """Block `index` of each group that has not given its back."""
        blocks = [blocks[index] for blocks in self.blocks]
        return [block for block in blocks if block is not None]

    def from_the_end(self) -> list[KVCacheBlock]:
        """All blocks, the deepest first; those of one depth together."""
        if len(self.blocks) == 1 and not self.num_given_back[0]:
            return self.blocks[0][::-1]  # type: ignore[return-value]
        return [
            block for depth in zip(*map(reversed, self.blocks), strict=True) for block in depth if block is not None
        ]
