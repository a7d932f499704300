"""All KV blocks of an engine: who is free, who is cached under which hash, how often each is referenced."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from engine_core.config import EvictionPolicy

from .block import KVCacheBlock
from .eviction import make_eviction_order
from .lost_blocks import LostBlocks
from .prefix_tree import PrefixNode, PrefixTree
from .retention import KeepTerms, KeptBlocks


class BlockPool:
    """Blocks 0 … num_blocks − 1, made once.

    Invariants, after any sequence of operations: `ref_cnt >= 0`; a block is in the free queue, exactly once, if and
    only if its `ref_cnt` is 0 and it is not kept; it is in `tree` if and only if it has a node.

    Args:
        num_blocks: at least 1.
        eviction_policy: which free block is taken first (`eviction`).
        num_groups: KV cache groups that share the blocks.
        max_kept_share: of the blocks, how many are kept at most (`retention`); `max_kept_share_per_tenant` for one.
        clock: in seconds; how long kept blocks stay is measured with it.
        tree: what remembers what is cached; default a plain one.

    Attributes:
        tree: what is cached, and in which blocks.
        kept: what is kept from being evicted.
        lost: what was cached until lately.
        num_freed: how often a block became free to be taken, since start.
    """

    def __init__(
        self,
        num_blocks: int,
        eviction_policy: EvictionPolicy = "lru",
        num_groups: int = 1,
        *,
        max_kept_share: float = 0.5,
        max_kept_share_per_tenant: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
        tree: PrefixTree | None = None,
    ) -> None:
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.eviction_policy: EvictionPolicy = eviction_policy
        self.free_queue = make_eviction_order(eviction_policy, self.blocks)
        self.num_freed = 0
        self.tree = PrefixTree(num_groups) if tree is None else tree
        self.kept = KeptBlocks(int(max_kept_share * num_blocks), int(max_kept_share_per_tenant * num_blocks), clock)
        self.lost = LostBlocks(max(2 * num_blocks, 1 << 15))

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_free_blocks(self) -> int:
        """How many are not referenced, kept ones included."""
        return len(self.free_queue) + self.kept.num_free_blocks

    @property
    def num_unkept_free_blocks(self) -> int:
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
        """Take `count` blocks from the head of the free queue, each with `ref_cnt` 1 and its old content evicted; where
        that has not so many, those that are kept as well.

        Raises:
            IndexError: fewer are free; nothing has changed.
        """
        self._give_up_kept(count)
        blocks = self.free_queue.pop(count)
        lost, loss = self.lost.begin(count, "evicted")
        drop = self.tree.drop
        for block in blocks:
            node = block.node
            if node is not None:
                drop(block)
                if node.num_blocks == 0:
                    lost[node.block_hash] = loss
                if node.block_hash is None:
                    self._release_rest_of(node)
            block.ref_cnt = 1
        return blocks

    def _release_rest_of(self, node: PrefixNode) -> None:
        """The beginning of a block is one in all groups or none: where one has lost it, the others keep nothing."""
        if self.kept.num_free_blocks:
            for block in node.copies:
                if isinstance(block, KVCacheBlock) and block.keep is not None and block.ref_cnt == 0:
                    self.kept.forget(block)
                    self._release((block,))

    def _give_up_kept(self, count: int) -> None:
        """Have `count` blocks in the free queue, if there are as many free ones."""
        num_lacking = count - len(self.free_queue)
        if 0 < num_lacking <= self.kept.num_free_blocks:
            self._release(self.kept.give_up(num_lacking))

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Reference each block, all different, once more, taking it out of the free queue if it lay there."""
        free = [block for block in blocks if block.ref_cnt == 0]
        if self.kept.num_free_blocks:
            self.kept.touched([block for block in free if block.keep is not None])
            free = [block for block in free if block.keep is None]
        self.free_queue.remove(free)
        for block in blocks:
            block.ref_cnt += 1
        self.free_queue.hit(blocks)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock], *, to_be_taken_first: bool = False) -> None:
        """Drop one reference of each, the deepest first, if they are of one request.

        `to_be_taken_first`: those that hold nothing a lookup could find go before all others.
        """
        freed = []
        for block in ordered_blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                freed.append(block)
        self.num_freed += len(freed)
        if self.kept.num_blocks:
            freed = self._keep_back(freed)
        if to_be_taken_first:
            self.free_queue.add_first([block for block in freed if block.node is None])
            freed = [block for block in freed if block.node is not None]
        self.free_queue.add(freed)

    def _keep_back(self, freed: list[KVCacheBlock]) -> list[KVCacheBlock]:
        """Those of `freed` that are not kept."""
        kept = []
        for block in freed:
            if block.keep is not None:
                if block.node is None:
                    self.kept.forget(block)
                else:
                    kept.append(block)
        if not kept:
            return freed
        self.kept.freed(kept)
        return [block for block in freed if block.keep is None]

    def keep(self, blocks: Sequence[KVCacheBlock], terms: KeepTerms) -> int:
        """Keep these blocks, all different, from the first one on as far as there is room (`KeptBlocks.keep`); how
        many are. For those that are free it is a use.
        """
        free = [block for block in blocks if block.ref_cnt == 0]
        self.touch(free)
        num_kept, released = self.kept.keep(blocks, terms)
        self._release(released)
        self.free_blocks(reversed(free))
        return num_kept

    def release_expired(self) -> None:
        """Blocks whose time is over are kept no longer."""
        self._release(self.kept.release_expired())

    def _release(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Free blocks that were kept until now are free as any other."""
        self.num_freed += len(blocks)
        self.free_queue.add(blocks)

    def unregister(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Let lookups no longer find these blocks; references and queue positions stay as they are."""
        for block in blocks:
            if block.node is not None:
                self.tree.drop(block)
                if block.keep is not None and block.ref_cnt == 0:
                    self.kept.forget(block)
                    self._release((block,))

    def reset(self) -> None:
        """Let lookups find nothing that is cached now, kept or not. Blocks that are referenced stay so."""
        lost, loss = self.lost.begin(self.tree.num_held, "reset")
        lost.update(dict.fromkeys(self.tree.held_hashes(), loss))
        self.tree.clear()
        for block in self.blocks:
            block.node, block.is_filled = None, False
            if block.keep is not None:
                self.kept.forget(block)
                if block.ref_cnt == 0:
                    self._release((block,))
        self.free_queue.reset()
