"""The pool and its free queue, against a slow and obvious model of both."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_core.kv_cache import BlockPool, FreeKVCacheBlockQueue, KVCacheBlock
from tests.engine_core.cached import cache_apart, cached_apart


def ids(queue: FreeKVCacheBlockQueue) -> list[int]:
    return [block.block_id for block in queue]


class TestFreeQueue:
    def setup_method(self):
        self.blocks = [KVCacheBlock(index) for index in range(5)]
        self.queue = FreeKVCacheBlockQueue(self.blocks)

    def test_starts_in_the_order_given(self):
        assert ids(self.queue) == [0, 1, 2, 3, 4] and len(self.queue) == 5

    def test_pops_from_the_head_and_appends_to_the_tail(self):
        popped = self.queue.pop(2)
        assert [block.block_id for block in popped] == [0, 1]
        self.queue.append(popped[::-1])
        assert ids(self.queue) == [2, 3, 4, 1, 0]

    def test_prepends_before_the_head(self):
        popped = self.queue.pop(3)
        self.queue.prepend(popped[:2])
        assert ids(self.queue) == [0, 1, 3, 4]

    @pytest.mark.parametrize("index", [0, 2, 4])
    def test_removes_wherever_the_block_stands(self, index: int):
        self.queue.remove([self.blocks[index]])
        assert ids(self.queue) == [i for i in range(5) if i != index]
        with pytest.raises(ValueError, match="not in the free queue"):
            self.queue.remove([self.blocks[index]])

    def test_popping_more_than_there_is_takes_nothing(self):
        with pytest.raises(IndexError, match="6 blocks wanted, 5 free"):
            self.queue.pop(6)
        assert ids(self.queue) == [0, 1, 2, 3, 4]

    def test_can_be_emptied_and_filled_again(self):
        blocks = self.queue.pop(5)
        assert ids(self.queue) == [] and len(self.queue) == 0
        self.queue.append(blocks)
        assert ids(self.queue) == [0, 1, 2, 3, 4]


def test_the_oldest_copy_serves_hits_and_the_next_takes_over():
    pool = BlockPool(4)
    copies = pool.get_new_blocks(3)
    for block in copies:
        cache_apart(pool, [block], [b"h"])
    assert cached_apart(pool, [b"h"]) == [copies[0]]
    pool.unregister([copies[0]])
    assert cached_apart(pool, [b"h"]) == [copies[1]]
    pool.unregister([copies[2]])
    assert cached_apart(pool, [b"h"]) == [copies[1]]
    pool.unregister([copies[1]])
    assert not cached_apart(pool, [b"h"]) and not pool.tree.copies()


def test_a_reset_forgets_blocks_in_use_as_well():
    pool = BlockPool(2)
    (block,) = pool.get_new_blocks(1)
    cache_apart(pool, [block], [b"h"])
    pool.reset()
    assert not cached_apart(pool, [b"h"]) and block.block_hash is None
    assert block.ref_cnt == 1 and pool.num_free_blocks == 1


class PoolMachine(RuleBasedStateMachine):
    """Random operations on a pool and on lists and dicts that say the same thing slowly."""

    @initialize(num_blocks=st.integers(1, 12), eviction_policy=st.sampled_from(["lru", "unhashed_first"]))
    def start(self, num_blocks: int, eviction_policy: str):
        self.pool = BlockPool(num_blocks, eviction_policy)
        self.free = list(range(num_blocks))
        self.refs = [0] * num_blocks
        self.hash_of: dict[int, bytes] = {}
        self.copies: dict[bytes, list[int]] = {}
        self.tables: list[list[int]] = []

    def forget(self, block_id: int) -> None:
        block_hash = self.hash_of.pop(block_id, None)
        if block_hash is not None:
            self.copies[block_hash].remove(block_id)
            if not self.copies[block_hash]:
                del self.copies[block_hash]

    @rule(count=st.integers(0, 13))
    def take(self, count: int):
        if count > len(self.free):
            with pytest.raises(IndexError):
                self.pool.get_new_blocks(count)
            return
        taken, self.free = self.free[:count], self.free[count:]
        assert [block.block_id for block in self.pool.get_new_blocks(count)] == taken
        for block_id in taken:
            self.forget(block_id)
            self.refs[block_id] = 1
        self.tables.append(taken)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def free_a_table(self, data: st.DataObject):
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))[::-1]
        self.pool.free_blocks([self.pool.blocks[block_id] for block_id in table])
        freed = []
        for block_id in table:
            self.refs[block_id] -= 1
            if self.refs[block_id] == 0:
                freed.append(block_id)
        if self.pool.eviction_policy == "unhashed_first":
            self.free = [b for b in freed if b not in self.hash_of] + self.free
            freed = [b for b in freed if b in self.hash_of]
        self.free += freed

    @precondition(lambda self: bool(self.hash_of))
    @rule(data=st.data())
    def hit(self, data: st.DataObject):
        count = data.draw(st.integers(1, len(self.copies)))
        chosen = [self.copies[block_hash][0] for block_hash in list(self.copies)[:count]]
        found = cached_apart(self.pool, [*list(self.copies)[:count], b"not cached", *self.copies])
        assert [block.block_id for block in found] == chosen
        self.pool.touch(found)
        for block_id in chosen:
            if self.refs[block_id] == 0:
                self.free.remove(block_id)
            self.refs[block_id] += 1
        self.tables.append(chosen)

    @rule(data=st.data(), digest=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def register(self, data: st.DataObject, digest: bytes):
        candidates = [b for b, refs in enumerate(self.refs) if refs and b not in self.hash_of]
        if not candidates:
            return
        block_id = data.draw(st.sampled_from(candidates))
        cache_apart(self.pool, [self.pool.blocks[block_id]], [digest])
        self.hash_of[block_id] = digest
        self.copies.setdefault(digest, []).append(block_id)

    @precondition(lambda self: bool(self.hash_of))
    @rule(data=st.data())
    def unregister(self, data: st.DataObject):
        block_id = data.draw(st.sampled_from(sorted(self.hash_of)))
        self.pool.unregister([self.pool.blocks[block_id]])
        self.forget(block_id)

    @rule()
    def reset(self):
        self.pool.reset()
        self.hash_of, self.copies = {}, {}

    @invariant()
    def agrees_with_the_model(self):
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        assert ids(pool.free_queue) == self.free
        assert pool.num_free_blocks == len(self.free) == len(set(self.free))
        assert [block.ref_cnt for block in pool.blocks] == self.refs
        assert min(self.refs) >= 0
        assert pool.num_free_blocks + sum(refs > 0 for refs in self.refs) == pool.num_blocks
        assert {b.block_id: b.block_hash for b in pool.blocks if b.block_hash is not None} == self.hash_of
        assert {h: [b.block_id for b in blocks] for h, blocks in pool.tree.copies().items()} == self.copies
        assert pool.tree.num_held == len(self.copies)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
