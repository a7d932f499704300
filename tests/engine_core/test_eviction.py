"""The orders in which free blocks are handed out; `frequency` against a slow statement of what it promises."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_core.kv_cache import BlockPool, KVCacheBlock
from engine_core.kv_cache.eviction import FrequencyOrder, make_eviction_order
from engine_core.kv_cache.prefix_tree import PrefixNode


class Caller:
    """Serves sequences of words, one block each, as a manager would, one after another or overlapping."""

    def __init__(self, num_blocks: int, policy: str = "frequency") -> None:
        self.pool = BlockPool(num_blocks, policy)  # type: ignore[arg-type]

    @property
    def order(self) -> FrequencyOrder:
        assert isinstance(self.pool.free_queue, FrequencyOrder)
        return self.pool.free_queue

    def cached_run(self, words: str) -> list[PrefixNode]:
        path = self.pool.tree.walk(self._hashes(words), [word.encode() for word in words])
        return path[: next((i for i, node in enumerate(path) if node.block(0) is None), len(path))]

    def begin(self, words: str) -> tuple[list[KVCacheBlock], int]:
        """The blocks of a request, and how many were found."""
        pool = self.pool
        nodes = self.cached_run(words)
        hits = [block for node in nodes if (block := node.block(0)) is not None]
        pool.touch(hits)
        new_blocks = pool.get_new_blocks(len(words) - len(hits))
        parent = nodes[-1] if nodes else pool.tree.root
        for block, word, block_hash in zip(new_blocks, words[len(hits) :], self._hashes(words)[len(hits) :]):
            node = pool.tree.add(parent, block_hash, word.encode(), [block])
            assert node is not None
            parent = node
        return hits + new_blocks, len(hits)

    def serve(self, words: str) -> int:
        blocks, num_hits = self.begin(words)
        self.pool.free_blocks(blocks[::-1])
        return num_hits

    @staticmethod
    def _hashes(words: str) -> list[bytes]:
        return [words[: end + 1].encode() for end in range(len(words))]


def test_what_was_used_often_outlives_what_was_used_once_lately():
    caller, lru = Caller(8), Caller(8, "lru")
    for each in (caller, lru):
        for words in ("ab", "ab", "ab", "cdef", "ghij"):
            each.serve(words)
    assert caller.serve("ab") == 2
    assert lru.serve("ab") == 0


def test_what_was_used_often_long_ago_goes_in_the_end():
    caller = Caller(8)
    for _ in range(5):
        caller.serve("ab")
    # Each is found once, so that the half-life, which is learned, does not run away.
    for number in range(400):
        caller.serve(chr(1000 + number) * 4)
    assert caller.serve("ab") == 0


def test_uses_are_remembered_beyond_eviction():
    caller = Caller(4)
    caller.serve("ab")
    caller.serve("cdef")
    assert not caller.cached_run("ab")
    caller.serve("ab")
    caller.serve("gh")
    assert caller.serve("ijkl"[:2]) == 0
    assert len(caller.cached_run("ab")) == 2, "asked for twice, so it stays before what was asked for once"


def test_memory_of_evicted_blocks_is_bounded():
    blocks = [KVCacheBlock(i) for i in range(2)]
    order = FrequencyOrder(blocks, num_remembered=3)
    caller = Caller(2)
    caller.pool.blocks, caller.pool.free_queue = blocks, order
    for number in range(50):
        caller.serve(chr(1000 + number))
    assert len(order._remembered) == 3


def test_forgetting_the_cache_forgets_the_uses():
    caller = Caller(4)
    for _ in range(3):
        caller.serve("ab")
    caller.serve("cdef")
    before = list(caller.order)
    caller.pool.reset()
    assert list(caller.order) == before
    assert not caller.order._remembered
    caller.serve("ab")
    assert {block.node.use[0] for block in caller.pool.blocks if block.node is not None and block.node.use} == {1.0}


def test_blocks_that_hold_nothing_go_first():
    caller = Caller(4)
    caller.serve("abc")
    unhashed = caller.pool.get_new_blocks(1)
    caller.pool.free_blocks(unhashed)
    assert next(iter(caller.pool.free_queue)) is unhashed[0]


def test_a_beginning_of_a_block_that_was_copied_is_worth_no_more():
    """A longer one takes its place."""
    caller = Caller(3)
    pool = caller.pool
    tail = pool.get_new_blocks(1)
    pool.tree.add_partial(pool.tree.root, b"x", tail)
    pool.free_blocks(tail)
    pool.touch(tail)
    pool.free_blocks(tail)
    node = tail[0].node
    assert node is not None and node.use is not None and node.use[0] == 1.0


def test_a_parent_that_long_documents_share_stays_with_its_children():
    """By itself it would be worth less than its child: the request that used it last added much."""
    caller = Caller(200)
    for _ in range(30):
        caller.serve("ab")
    caller.serve("a" + "".join(chr(1000 + number) for number in range(64)))
    words = [block.node.content for block in caller.order if block.node is not None]
    assert words.index(b"b") < words.index(b"a")


@pytest.mark.parametrize("scale", [1, 7])
def test_the_half_life_follows_the_gaps_between_uses(scale: int):
    """So that the size of a block, or of the traffic, is no setting."""
    caller = Caller(200)
    for turn in range(3000):
        for part in range(scale):
            caller.serve(chr(1000 + turn % 20) + chr(3000 + part))
    # Each word comes again after twenty turns of `scale` requests, two blocks each (of which one was made or found…).
    gap_blocks = 20 * scale * 2
    assert gap_blocks / 4 < 0.4 * caller.order.half_life_blocks < gap_blocks * 4


def test_an_order_gives_out_all_or_nothing_and_knows_what_is_free():
    for policy in ("lru", "unhashed_first", "frequency"):
        blocks = [KVCacheBlock(i) for i in range(3)]
        order = make_eviction_order(policy, blocks)
        with pytest.raises(IndexError):
            order.pop(4)
        assert len(order) == 3
        taken = order.pop(2)
        with pytest.raises(ValueError):
            order.remove(taken[:1])
        order.remove(blocks[2:])
        assert len(order) == 0 and not list(order)


def test_levels_that_hits_have_emptied_do_not_pile_up():
    caller = Caller(300)
    for number in range(3000):
        caller.serve(chr(1000 + number % 100))
    assert len(caller.order._heap) <= 64 + 5 * len(caller.order._queues)


class FrequencyMachine(RuleBasedStateMachine):
    """Requests of random words come, overlap and end; the order is checked against what it says of itself."""

    @initialize(num_blocks=st.integers(6, 24))
    def start(self, num_blocks: int):
        self.caller = Caller(num_blocks)
        self.running: list[tuple[list[KVCacheBlock], int]] = []

    @rule(words=st.text("ab", min_size=1, max_size=6))
    def serve(self, words: str):
        held = {id(block) for blocks, _ in self.running for block in blocks}
        if len(words) > self.caller.pool.num_blocks - len(held):
            return
        self.running.append(self.caller.begin(words))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject):
        blocks, _ = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.caller.pool.free_blocks(blocks[::-1])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject):
        """What it registered is forgotten, where nobody else shares it; what it found stays."""
        blocks, num_hits = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.caller.pool.unregister([block for block in blocks[num_hits:] if block.ref_cnt == 1])
        self.caller.pool.free_blocks(blocks[::-1])

    @invariant()
    def each_free_block_is_there_once(self):
        if not hasattr(self, "caller"):
            return
        pool = self.caller.pool
        free = list(pool.free_queue)
        assert len(free) == len({id(block) for block in free}) == pool.num_free_blocks
        assert {block.block_id for block in free} == {b.block_id for b in pool.blocks if b.ref_cnt == 0}

    @invariant()
    def nobody_goes_before_its_children(self):
        if not hasattr(self, "caller"):
            return
        num_left = {}
        for block in self.caller.pool.free_queue:
            node = block.node
            if node is None:
                continue
            assert node.parent is not None
            num_left[node] = num_left.get(node, node.num_blocks) - 1
            assert num_left.get(node.parent) != 0, "all copies of the parent are handed out before"


TestFrequencyMachine = FrequencyMachine.TestCase
TestFrequencyMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@settings(max_examples=100, deadline=None)
@given(requests=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=40), num_blocks=st.integers(5, 12))
def test_blocks_stand_by_their_worth(requests: list[str], num_blocks: int):
    """The order of requests that come one after another, worked out again from the uses alone."""
    caller = Caller(num_blocks)
    for words in requests:
        caller.serve(words)
    worths: dict[PrefixNode, float] = {}
    free = list(caller.pool.free_queue)
    # Children stand before their parents, and parents no lower than they.
    for block in free:
        node = block.node
        if node is None:
            continue
        assert node.use is not None and node.parent is not None
        uses, used_at = node.use
        worths[node] = max(used_at + 0.7 * math.log2(uses), worths.get(node, -math.inf))
        worths[node.parent] = max(worths[node], worths.get(node.parent, -math.inf))
    ordered = [worths[block.node] for block in free if block.node is not None]
    slack = 2 / 8 + 0.05 * math.log2(5)  # levels are eighths; what a request added counts, too
    assert all(left <= right + slack for left, right in itertools.pairwise(ordered))
