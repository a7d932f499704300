"""Notes what a prefix tree gains and loses, as cheaply as can be: the engine loop waits for it.

A block is stored when a step that has run has written it, and removed when it is taken for something else: what is
registered in a step that fails or is withdrawn was never there. Of blocks with equal content and place the first one
and the last one count. Beginnings of blocks have no hash, so nobody is told of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Literal, NamedTuple

from engine_core.kv_cache.block import KVCacheBlock
from engine_core.kv_cache.prefix_tree import PrefixNode, PrefixTree


class CacheChange(NamedTuple):
    """`node`, of a whole block, has a block in `group` now, or has none any more; or no node has.

    What is read of a node later (its hash, its parent, its content) never changes.
    """

    what: Literal["stored", "removed", "cleared"]
    group: int = 0
    node: PrefixNode | None = None


CLEARED = CacheChange("cleared")
_group = attrgetter("group")


class KVEventRecorder(PrefixTree):
    """A tree that collects its changes until they are taken.

    If nobody takes them for long, nothing is lost: then the whole tree takes their place.

    Args:
        num_groups: KV cache groups.
        num_blocks: of the pool; so many changes, four times, are collected at most.
    """

    def __init__(self, num_groups: int, num_blocks: int) -> None:
        self._changes: list[CacheChange] = []
        self._is_overdue = False
        # A step may take every block and fill it, and one launched behind it may have begun to.
        self._max_changes = 4 * num_blocks
        super().__init__(num_groups)
        self._changes.clear()

    @property
    def has_changes(self) -> bool:
        return bool(self._changes) or self._is_overdue

    def take(self) -> list[CacheChange]:
        """What has changed since the last call, in order."""
        changes, self._changes = self._changes, []
        if self._is_overdue:
            self._is_overdue = False
            return [CLEARED, *self.snapshot()]
        return changes

    def snapshot(self) -> list[CacheChange]:
        """All that is there now, as if it had been stored just now, parents before children; O(nodes)."""
        if self._num_groups == 1:
            return [CacheChange("stored", 0, node) for node in self._nodes.values() if node.is_source]
        return [
            CacheChange("stored", group, node)
            for group in range(self._num_groups)
            for node in self._nodes.values()
            if node.filled_block(group) is not None
        ]

    def fill(self, blocks: Iterable[KVCacheBlock]) -> None:
        blocks = list(blocks)
        # Group after group, so that those of one group follow each other.
        for block in blocks if self._num_groups == 1 else sorted(blocks, key=_group):
            node = block.node
            assert node is not None
            if node.block_hash is not None and node.filled_block(block.group) is None:
                self._note(CacheChange("stored", block.group, node))
        super().fill(blocks)

    def drop(self, block: KVCacheBlock) -> None:
        node, was_filled = block.node, block.is_filled
        super().drop(block)
        if was_filled and node is not None and node.block_hash is not None and node.filled_block(block.group) is None:
            self._note(CacheChange("removed", block.group, node))

    def clear(self) -> None:
        super().clear()
        self._changes.clear()
        self._note(CLEARED)

    def _note(self, change: CacheChange) -> None:
        if self._is_overdue:
            return
        if len(self._changes) == self._max_changes:
            self._changes.clear()
            self._is_overdue = True
            return
        self._changes.append(change)
