"""All KV blocks of an engine: who is free, who is cached under which hash, how often each is referenced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine_core.config import EvictionPolicy

from .block import KVCacheBlock
from .eviction import make_eviction_order
from .prefix_tree import PrefixTree


class BlockPool:
    """Blocks 0 … num_blocks − 1, made once.

    Invariants, after any sequence of operations: `ref_cnt >= 0`; a block is in the free queue, exactly once, if and
    only if its `ref_cnt` is 0; it is in `tree` if and only if it has a node.

    Args:
        num_blocks: at least 1.
        eviction_policy: which free block is taken first (`eviction`).
        num_groups: KV cache groups that share the blocks.

    Attributes:
        tree: what is cached, and in which blocks.
        num_freed: how often a block's last reference was dropped, since start.
    """

    def __init__(self, num_blocks: int, eviction_policy: EvictionPolicy = "lru", num_groups: int = 1) -> None:
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.eviction_policy: EvictionPolicy = eviction_policy
        self.free_queue = make_eviction_order(eviction_policy, self.blocks)
        self.num_freed = 0
        self.tree = PrefixTree(num_groups)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_queue)

    @property
    def num_cached_blocks(self) -> int:
        """How many blocks a lookup could find, copies and beginnings of blocks included; O(blocks)."""
        return sum(block.node is not None for block in self.blocks)

    @property
    def usage(self) -> float:
        """Share of the blocks that are referenced; cached but unreferenced ones count as free."""
        return 1.0 - self.num_free_blocks / len(self.blocks)

    def get_new_blocks(self, count: int) -> list[KVCacheBlock]:
        """Take `count` blocks from the head of the free queue, each with `ref_cnt` 1 and its old content evicted.

        Raises:
            IndexError: fewer are free; nothing has changed.
        """
        blocks = self.free_queue.pop(count)
        for block in blocks:
            if block.node is not None:
                self.tree.drop(block)
            block.ref_cnt = 1
        return blocks

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Reference each block, all different, once more, taking it out of the free queue if it lay there."""
        self.free_queue.remove([block for block in blocks if block.ref_cnt == 0])
        for block in blocks:
            block.ref_cnt += 1
        self.free_queue.hit(blocks)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Drop one reference of each, the deepest first, if they are of one request."""
        freed = []
        for block in ordered_blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                freed.append(block)
        self.num_freed += len(freed)
        self.free_queue.add(freed)

    def unregister(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Let lookups no longer find these blocks; references and queue positions stay as they are."""
        for block in blocks:
            if block.node is not None:
                self.tree.drop(block)

    def reset(self) -> bool:
        """Forget everything cached, if no block is referenced; else change nothing and return False."""
        if self.num_free_blocks != len(self.blocks):
            return False
        self.tree.clear()
        self.free_queue.reset()
        for block in self.blocks:
            block.node, block.is_filled = None, False
        return True
