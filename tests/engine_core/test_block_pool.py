"""The pool and its free queue, against a slow and obvious model of both."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_core.kv_cache import BlockPool, FreeKVCacheBlockQueue, KVCacheBlock
from engine_core.kv_cache.retention import KeepTerms
from tests.engine_core.cached import cache_apart, cached_apart
from tests.engine_core.slow_retention import Clock, joint


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


@dataclass
class Kept:
    """On what terms a block is kept, and if it is free when it expires; of equals the one with the lowest `rank` goes
    first.
    """

    terms: KeepTerms
    expires_s: float = 0.0
    rank: tuple[int, int] = (0, 0)


class PoolMachine(RuleBasedStateMachine):
    """Random operations on a pool and on lists and dicts that say the same thing slowly."""

    @initialize(
        num_blocks=st.integers(1, 12),
        eviction_policy=st.sampled_from(["lru", "unhashed_first"]),
        share=st.sampled_from([0.5, 1.0]),
        share_of_tenant=st.sampled_from([0.3, 0.6, 1.0]),
    )
    def start(self, num_blocks: int, eviction_policy: str, share: float, share_of_tenant: float):
        self.clock = Clock()
        self.pool = BlockPool(
            num_blocks,
            eviction_policy,
            max_kept_share=share,
            max_kept_share_per_tenant=share_of_tenant,
            clock=self.clock,
        )
        self.most_kept, self.most_of_tenant = int(share * num_blocks), int(share_of_tenant * num_blocks)
        self.kept: dict[int, Kept] = {}
        self.num_freed_together = 0
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

    def line_up(self, block_ids: list[int], *, to_be_taken_first: bool = False) -> None:
        if to_be_taken_first or self.pool.eviction_policy == "unhashed_first":
            self.free = [b for b in block_ids if b not in self.hash_of] + self.free
            block_ids = [b for b in block_ids if b in self.hash_of]
        self.free += block_ids

    def drop_references(self, block_ids: list[int], *, to_be_taken_first: bool = False) -> None:
        freed: list[int] = []
        together: dict[KeepTerms, int] = {}
        for place, block_id in enumerate(block_ids):
            self.refs[block_id] -= 1
            if self.refs[block_id] > 0:
                continue
            if block_id in self.kept and block_id in self.hash_of:
                terms = self.kept[block_id].terms
                number = together.setdefault(terms, self.num_freed_together + len(together))
                self.kept[block_id] = Kept(terms, self.clock.now_s + terms.ttl_s, (number, place))
            else:
                self.kept.pop(block_id, None)
                freed.append(block_id)
        self.num_freed_together += len(together)
        self.line_up(freed, to_be_taken_first=to_be_taken_first)

    def free_kept(self) -> list[int]:
        """In the order in which they expire."""
        free = [block_id for block_id in self.kept if self.refs[block_id] == 0]
        return sorted(free, key=lambda block_id: (self.kept[block_id].expires_s, self.kept[block_id].rank))

    def by_priority(self) -> list[int]:
        return sorted(self.free_kept(), key=lambda block_id: self.kept[block_id].terms.priority)

    def release(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            del self.kept[block_id]
        self.line_up(block_ids)

    @rule(count=st.integers(0, 13))
    def take(self, count: int):
        if count > len(self.free) + len(self.free_kept()):
            with pytest.raises(IndexError):
                self.pool.get_new_blocks(count)
            return
        self.release(self.by_priority()[: max(0, count - len(self.free))])
        taken, self.free = self.free[:count], self.free[count:]
        assert [block.block_id for block in self.pool.get_new_blocks(count)] == taken
        for block_id in taken:
            self.forget(block_id)
            self.refs[block_id] = 1
        self.tables.append(taken)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), to_be_taken_first=st.booleans())
    def free_a_table(self, data: st.DataObject, to_be_taken_first: bool):
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))[::-1]
        blocks = [self.pool.blocks[block_id] for block_id in table]
        self.pool.free_blocks(blocks, to_be_taken_first=to_be_taken_first)
        self.drop_references(table, to_be_taken_first=to_be_taken_first)

    def add_references(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            if self.refs[block_id] == 0 and block_id not in self.kept:
                self.free.remove(block_id)
            self.refs[block_id] += 1

    @precondition(lambda self: bool(self.hash_of))
    @rule(data=st.data())
    def hit(self, data: st.DataObject):
        count = data.draw(st.integers(1, len(self.copies)))
        chosen = [self.copies[block_hash][0] for block_hash in list(self.copies)[:count]]
        found = cached_apart(self.pool, [*list(self.copies)[:count], b"not cached", *self.copies])
        assert [block.block_id for block in found] == chosen
        self.pool.touch(found)
        self.add_references(chosen)
        self.tables.append(chosen)

    @precondition(lambda self: any(self.tables) or bool(self.hash_of))
    @rule(
        data=st.data(),
        tenant=st.sampled_from("ab"),
        ttl_s=st.sampled_from([1.0, 10.0]),
        priority=st.integers(0, 2),
    )
    def keep(self, data: st.DataObject, tenant: str, ttl_s: float, priority: int):
        """What a request has, or what is cached, free or not."""
        cached = [copies[0] for copies in self.copies.values()]
        block_ids = data.draw(st.sampled_from([blocks for blocks in [*self.tables, cached] if blocks]))
        terms = KeepTerms(tenant, ttl_s, priority)
        num_kept = self.pool.keep([self.pool.blocks[block_id] for block_id in block_ids], terms)
        were_free = [block_id for block_id in block_ids if self.refs[block_id] == 0]
        self.add_references(were_free)
        gave_way: list[int] = []
        num_expected = 0
        for block_id in block_ids:
            present = self.kept.get(block_id)
            wanted = terms if present is None else joint([present.terms, terms])
            if not self.has_room(wanted, present):
                lower = [
                    other
                    for other in self.by_priority()
                    if self.kept[other].terms.tenant == wanted.tenant and self.kept[other].terms.priority < priority
                ]
                if not lower:
                    break
                gave_way.append(lower[0])
                del self.kept[lower[0]]
            self.kept[block_id] = Kept(wanted)
            num_expected += 1
        assert num_kept == num_expected
        self.line_up(gave_way)
        self.drop_references(were_free[::-1])

    def has_room(self, wanted: KeepTerms, present: Kept | None) -> bool:
        if present is not None and present.terms.tenant == wanted.tenant:
            return True
        num_of_tenant = sum(kept.terms.tenant == wanted.tenant for kept in self.kept.values())
        return num_of_tenant < self.most_of_tenant and (present is not None or len(self.kept) < self.most_kept)

    @rule(duration_s=st.sampled_from([0.5, 1.0, 10.0]))
    def time_passes(self, duration_s: float):
        self.clock.now_s += duration_s
        self.pool.release_expired()
        self.release([b for b in self.free_kept() if self.kept[b].expires_s <= self.clock.now_s])

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
        if block_id in self.free_kept():
            self.release([block_id])

    @rule()
    def reset(self):
        self.pool.reset()
        self.hash_of, self.copies = {}, {}
        for block_id in sorted(self.free_kept()):
            self.release([block_id])
        self.kept = {}

    @invariant()
    def agrees_with_the_model(self):
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        free_kept = self.free_kept()
        assert ids(pool.free_queue) == self.free
        assert pool.num_free_blocks == len(self.free) + len(free_kept) == len({*self.free, *free_kept})
        assert pool.num_unkept_free_blocks == len(self.free)
        assert [block.ref_cnt for block in pool.blocks] == self.refs
        assert min(self.refs) >= 0
        assert pool.num_free_blocks + sum(refs > 0 for refs in self.refs) == pool.num_blocks
        assert {b.block_id: b.block_hash for b in pool.blocks if b.block_hash is not None} == self.hash_of
        assert {h: [b.block_id for b in blocks] for h, blocks in pool.tree.copies().items()} == self.copies
        assert pool.tree.num_held == len(self.copies)
        terms = {block_id: kept.terms for block_id, kept in self.kept.items()}
        assert {b.block_id: b.keep.terms for b in pool.blocks if b.keep is not None} == terms
        tenants = Counter(kept.tenant for kept in terms.values())
        assert {name: tenant.num_blocks for name, tenant in pool.kept._tenants.items()} == tenants
        assert pool.kept.num_blocks == len(terms) <= self.most_kept
        assert max(tenants.values(), default=0) <= self.most_of_tenant


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
