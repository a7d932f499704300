"""All KV blocks of an engine: who is free, who is cached under which hash, how often each is referenced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine_core.config import FreeOrder

from .block import FreeKVCacheBlockQueue, KVCacheBlock


class BlockPool:
    """Blocks 0 … num_blocks − 1, made once.

    Invariants, after any sequence of operations: `ref_cnt >= 0`; a block is in the free queue, exactly once, if and
    only if its `ref_cnt` is 0; it is in `cached` if and only if it has a hash.

    Args:
        num_blocks: at least 1.
        free_order: `append_all` puts freed blocks at the tail in the order given. `unhashed_first` puts those
            without a hash before the head instead, since nothing is lost when they are taken first.

    Attributes:
        num_freed: how often a block's last reference was dropped, since start.
    """

    def __init__(self, num_blocks: int, free_order: FreeOrder = "append_all") -> None:
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.free_queue = FreeKVCacheBlockQueue(self.blocks)
        self.free_order: FreeOrder = free_order
        self.num_freed = 0
        # A block table is append-only, so equal content may sit in several blocks. One is the rule, so only several
        # cost a dict; in its insertion order, the oldest copy serves hits.
        self.cached: dict[bytes, KVCacheBlock | dict[int, KVCacheBlock]] = {}

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_free_blocks(self) -> int:
        return self.free_queue.num_blocks

    @property
    def num_cached_blocks(self) -> int:
        """How many blocks a lookup could find, copies included; O(blocks)."""
        return sum(block.block_hash is not None for block in self.blocks)

    @property
    def usage(self) -> float:
        """Share of the blocks that are referenced; cached but unreferenced ones count as free."""
        return 1.0 - self.num_free_blocks / len(self.blocks)

    def get_cached_run(self, hashes: Iterable[bytes]) -> list[KVCacheBlock]:
        """The cached blocks of the first hashes, up to the first that is not cached."""
        get_entry = self.cached.get
        run = []
        for block_hash in hashes:
            entry = get_entry(block_hash)
            if entry is None:
                break
            run.append(entry if isinstance(entry, KVCacheBlock) else _oldest_copy(entry))
        return run

    def get_new_blocks(self, count: int) -> list[KVCacheBlock]:
        """Take `count` blocks from the head of the free queue, each with `ref_cnt` 1 and its old content evicted.

        Raises:
            IndexError: fewer are free; nothing has changed.
        """
        blocks = self.free_queue.pop(count)
        for block in blocks:
            if block.block_hash is not None:
                self._drop_hash(block)
            block.ref_cnt = 1
        return blocks

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Reference each block, all different, once more, taking it out of the free queue if it lay there."""
        self.free_queue.remove([block for block in blocks if block.ref_cnt == 0])
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Drop one reference of each. Those nobody references any more are evicted in the order given."""
        freed = []
        for block in ordered_blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                freed.append(block)
        self.num_freed += len(freed)
        if self.free_order == "unhashed_first":
            self.free_queue.prepend([block for block in freed if block.block_hash is None])
            freed = [block for block in freed if block.block_hash is not None]
        self.free_queue.append(freed)

    def register(self, blocks: Sequence[KVCacheBlock], hashes: Sequence[bytes]) -> None:
        """Let prefix lookups find `blocks[i]` under `hashes[i]`. The blocks have no hash yet."""
        cached = self.cached
        for block, block_hash in zip(blocks, hashes, strict=True):
            assert block.block_hash is None, block
            block.block_hash = block_hash
            entry = cached.get(block_hash)
            if entry is None:
                cached[block_hash] = block
            elif isinstance(entry, KVCacheBlock):
                cached[block_hash] = {entry.block_id: entry, block.block_id: block}
            else:
                entry[block.block_id] = block

    def unregister(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Let lookups no longer find these blocks; references and queue positions stay as they are."""
        for block in blocks:
            if block.block_hash is not None:
                self._drop_hash(block)

    def reset(self) -> bool:
        """Forget everything cached, if no block is referenced; else change nothing and return False."""
        if self.num_free_blocks != len(self.blocks):
            return False
        self.cached.clear()
        for block in self.blocks:
            block.block_hash = None
        return True

    def _drop_hash(self, block: KVCacheBlock) -> None:
        block_hash = block.block_hash
        assert block_hash is not None
        block.block_hash = None
        entry = self.cached[block_hash]
        if isinstance(entry, KVCacheBlock):
            del self.cached[block_hash]
            return
        del entry[block.block_id]
        if len(entry) == 1:
            self.cached[block_hash] = _oldest_copy(entry)


def _oldest_copy(copies: dict[int, KVCacheBlock]) -> KVCacheBlock:
    return next(iter(copies.values()))
