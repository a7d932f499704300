"""A KV block's bookkeeping, and the queue of free ones threaded through the blocks themselves.

The intrusive list is vLLM's idea: leaving the middle of the queue (a cached block is hit while free) is as
cheap as leaving its head, and no queue operation allocates memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .prefix_tree import PrefixNode
    from .retention import Keep


class KVCacheBlock:
    """One block of the pool.

    `ref_cnt` counts the block tables that contain it, and copies to be made from it; at 0 it is in the free queue, and
    only then, unless it is kept. `keep` says on what terms it is, or will be when it is free.

    While a lookup can find the block, it holds what `node` says for the layers of `group`; then `is_filled` tells
    whether all of that was written by steps that have run. `level` is where `FrequencyOrder` put it.
    """

    __slots__ = ("block_id", "group", "is_filled", "keep", "level", "next_free", "node", "prev_free", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.node: PrefixNode | None = None
        self.group = 0
        self.is_filled = False
        self.level = 0
        self.keep: Keep | None = None
        self.prev_free: KVCacheBlock | None = None
        self.next_free: KVCacheBlock | None = None

    @property
    def block_hash(self) -> bytes | None:
        """The identity of a full block that a lookup can find."""
        return None if self.node is None else self.node.block_hash

    def __repr__(self) -> str:
        digest = self.block_hash.hex()[:8] if self.block_hash else None
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, hash={digest})"


class FreeKVCacheBlockQueue:
    """Free blocks, next to be handed out first. Every operation is O(1) per block it moves.

    Two sentinels stand before the head and behind the tail, so a queued block always has both neighbours and
    no operation needs to ask whether it is at an end.
    """

    __slots__ = ("_after_tail", "_before_head", "num_blocks")

    def __init__(self, blocks: Sequence[KVCacheBlock] = ()) -> None:
        self._before_head = KVCacheBlock(-1)
        self._after_tail = KVCacheBlock(-1)
        self._before_head.next_free = self._after_tail
        self._after_tail.prev_free = self._before_head
        self.num_blocks = 0
        self.append(blocks)

    def __len__(self) -> int:
        return self.num_blocks

    def __iter__(self) -> Iterator[KVCacheBlock]:
        """From head to tail. The queue must not change meanwhile."""
        block = self._before_head.next_free
        while block is not None and block is not self._after_tail:
            yield block
            block = block.next_free

    def append(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add blocks behind the tail, the last one given becoming the tail."""
        self._insert_after(self._after_tail.prev_free, blocks)

    def prepend(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add blocks before the head, the first one given becoming the head."""
        self._insert_after(self._before_head, blocks)

    def _insert_after(self, left: KVCacheBlock | None, blocks: Sequence[KVCacheBlock]) -> None:
        assert left is not None
        right = left.next_free
        assert right is not None
        for block in blocks:
            left.next_free = block
            block.prev_free = left
            left = block
        left.next_free = right
        right.prev_free = left
        self.num_blocks += len(blocks)

    def pop(self, count: int) -> list[KVCacheBlock]:
        """Take `count` blocks from the head.

        Raises:
            IndexError: fewer are free; nothing is taken.
        """
        if count > self.num_blocks:
            raise IndexError(f"{count} blocks wanted, {self.num_blocks} free")
        popped = []
        block = self._before_head.next_free
        for _ in range(count):
            assert block is not None
            popped.append(block)
            following = block.next_free
            block.prev_free = block.next_free = None
            block = following
        assert block is not None
        self._before_head.next_free = block
        block.prev_free = self._before_head
        self.num_blocks -= count
        return popped

    def remove(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Take blocks out, wherever they stand.

        Raises:
            ValueError: one is not in the queue.
        """
        for block in blocks:
            left, right = block.prev_free, block.next_free
            if left is None or right is None:
                raise ValueError(f"{block!r} is not in the free queue")
            left.next_free = right
            right.prev_free = left
            block.prev_free = block.next_free = None
        self.num_blocks -= len(blocks)
