"""Notes what a prefix tree gains and loses, as cheaply as can be: the engine loop waits for it.

A block is stored when a step that has run has written it, and removed when it is taken for something else: what is
registered in a step that fails or is withdrawn was never there. Of blocks with equal content and place the first one
and the last one count. Beginnings of blocks have no hash, so nobody is told of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from engine_core.kv_cache.block import KVCacheBlock
from engine_core.kv_cache.prefix_tree import PrefixNode, PrefixTree


class CacheChange(NamedTuple):
    """`nodes`, of whole blocks, have a block in `group` now, or have none any more; or no node has.

    What is read of a node later (its hash, its parent, its content) never changes.
    """

    what: Literal["stored", "removed", "cleared"]
    group: int
    nodes: list[PrefixNode]


def cleared() -> CacheChange:
    return CacheChange("cleared", 0, [])


class KVEventRecorder(PrefixTree):
    """A tree that collects its changes until they are taken.

    If nobody takes them for long, nothing is lost: then the whole tree takes their place.

    Args:
        num_groups: KV cache groups.
        num_blocks: of the pool; of four times as many nodes changes are collected at most.
    """

    def __init__(self, num_groups: int, num_blocks: int) -> None:
        self._forget_changes()
        self._is_overdue = False
        # A step may take every block and fill it, and one launched behind it may have begun to.
        self._max_nodes = 4 * num_blocks
        super().__init__(num_groups)
        self._forget_changes()

    def _forget_changes(self) -> None:
        self._changes: list[CacheChange] = []
        self._num_nodes = 0

    @property
    def has_changes(self) -> bool:
        return bool(self._changes) or self._is_overdue

    def take(self) -> list[CacheChange]:
        """What has changed since the last call, in order. Two that follow each other differ in kind or group."""
        changes = self._changes
        self._forget_changes()
        if self._is_overdue:
            self._is_overdue = False
            return [cleared(), *self.snapshot()]
        return changes

    def snapshot(self) -> list[CacheChange]:
        """All that is there now, as if it had been stored just now, parents before children; O(nodes)."""
        nodes = self._nodes.values()
        if self._num_groups == 1:
            return [CacheChange("stored", 0, [node for node in nodes if node.is_source])]
        return [
            CacheChange("stored", group, [node for node in nodes if node.filled_block(group) is not None])
            for group in range(self._num_groups)
        ]

    def fill(self, blocks: Iterable[KVCacheBlock]) -> None:
        blocks = list(blocks)
        if self._num_groups == 1:
            self._note("stored", 0, _newly_held(blocks))
        else:
            # Group after group, so that those of one group follow each other.
            for group in range(self._num_groups):
                self._note("stored", group, _newly_held([block for block in blocks if block.group == group]))
        super().fill(blocks)

    def drop(self, block: KVCacheBlock) -> None:
        node, was_filled = block.node, block.is_filled
        super().drop(block)
        if not was_filled or node is None or node.block_hash is None:
            return
        # The usual case is that of a block that has no copy.
        if node.copies[block.group] is None or node.filled_block(block.group) is None:
            self._note("removed", block.group, [node])

    def clear(self) -> None:
        super().clear()
        self._forget_changes()
        if not self._is_overdue:
            self._changes.append(cleared())

    def _note(self, what: Literal["stored", "removed"], group: int, nodes: list[PrefixNode]) -> None:
        self._num_nodes += len(nodes)
        if self._num_nodes > self._max_nodes:
            self._forget_changes()
            self._is_overdue = True
        if self._is_overdue or not nodes:
            return
        if self._changes and self._changes[-1].what is what and self._changes[-1].group == group:
            self._changes[-1].nodes.extend(nodes)
        else:
            self._changes.append(CacheChange(what, group, nodes))


def _newly_held(blocks: Iterable[KVCacheBlock]) -> list[PrefixNode]:
    """The nodes of whole blocks, none of which has a filled block but those in `blocks`, all of one group."""
    return [
        node
        for block in blocks
        if (node := block.node) is not None
        and node.block_hash is not None
        and not block.is_filled
        # The usual case is that of a block that has no copy.
        and (node.copies[block.group] is block or node.filled_block(block.group) is None)
    ]
