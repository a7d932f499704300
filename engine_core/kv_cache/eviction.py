"""In which order free blocks are handed out again, which evicts what is cached in them.

A block that a request references is not free, so an order decides only about what nobody is using. Whatever the order,
a block goes before those it follows: without its parents no lookup reaches it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from math import exp2, log2
from typing import Protocol, assert_never

from engine_core.config import EvictionPolicy

from .block import FreeKVCacheBlockQueue, KVCacheBlock
from .prefix_tree import PrefixNode


class EvictionOrder(Protocol):
    """Free blocks, next to be handed out first."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[KVCacheBlock]:
        """Next to be handed out first. The order must not change meanwhile."""
        ...

    def add(self, blocks: Sequence[KVCacheBlock]) -> None:
        """These were freed together, the deepest first."""
        ...

    def add_first(self, blocks: Sequence[KVCacheBlock]) -> None:
        """These, which hold nothing a lookup could find, are to go before all others."""
        ...

    def pop(self, count: int) -> list[KVCacheBlock]:
        """Take the first `count` blocks. They still have their nodes.

        Raises:
            IndexError: fewer are free; nothing is taken.
        """
        ...

    def remove(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Take blocks out, wherever they stand: they were hit.

        Raises:
            ValueError: one is not free.
        """
        ...

    def hit(self, blocks: Sequence[KVCacheBlock]) -> None:
        """A request found these in the cache, free or not, in the order of its sequence."""
        ...

    def reset(self) -> None:
        """Nothing is cached any more. The order of the blocks stays."""
        ...


class LruOrder(FreeKVCacheBlockQueue):
    """Who was freed first goes first. Every operation is O(1) per block."""

    __slots__ = ()

    def add(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.append(blocks)

    def add_first(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.prepend(blocks)

    def hit(self, blocks: Sequence[KVCacheBlock]) -> None:
        pass

    def reset(self) -> None:
        pass


class UnhashedFirstOrder(LruOrder):
    """As `LruOrder`, but blocks that hold nothing a lookup could find go before all others."""

    __slots__ = ()

    def add(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.prepend([block for block in blocks if block.node is None])
        self.append([block for block in blocks if block.node is not None])


# How often a prefix was used, older uses counting less, and when last (`FrequencyOrder.now`). Blocks of a prefix that
# were used alike share one.
Use = tuple[float, float]

# Chosen on public traces (docs/benchmarks.md); what they mean is said in `FrequencyOrder`.
_USES_POWER = 0.7
_ADDED_POWER = 0.05
_USES_HALF_LIFE = 4.0
_MEDIAN_GAP = 0.4
_LEVELS_PER_HALF_LIFE = 8
_UNHASHED = -1 << 62


class FrequencyOrder:
    """What was used often and lately goes last; so does, a little, what grows in small steps.

    A block's worth is `uses ** 0.7 / added ** 0.05`, halved with every half-life since it was free last. `uses` counts
    the requests that found or made it, with a half-life four times as long; it is remembered beyond eviction, by hash.
    `added` is how many blocks the request that freed it last had made: what grows by a message is more often
    continued than a long document.

    Time is counted in blocks that requests took or found, so it does not depend on a clock. The half-life is learned:
    half of all reuses that are seen, of evicted blocks as well, are to come within 0.4 of one.

    Since worths only ever halve together, their order never changes by itself: a block stands in a queue with all those
    of about its logarithm. Every operation is O(1) per block, and O(log levels) per level that becomes or ceases to be
    needed. A parent stands in no lower level than its children.

    Args:
        blocks: free from the start.
        num_remembered: of how many evicted blocks uses are remembered.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock], num_remembered: int) -> None:
        self._num_remembered = num_remembered
        self._remembered: OrderedDict[bytes, Use] = OrderedDict()
        self._step = 1.0 / max(1, min(len(blocks), 4096))
        self.half_life_blocks = 4.0 * max(1, len(blocks))
        self.now = 0.0  # in half-lives
        self._num_blocks = 0
        self._queues: dict[int, FreeKVCacheBlockQueue] = {}
        self._heap: list[int] = []
        self._append(_UNHASHED, blocks)

    def __len__(self) -> int:
        return self._num_blocks

    def __iter__(self) -> Iterator[KVCacheBlock]:
        for level in sorted(self._queues):
            yield from self._queues[level]

    def add(self, blocks: Sequence[KVCacheBlock]) -> None:
        now = self.now
        added: Use = (1.0, now)
        num_added = 0
        before: Use | None = None
        after = added
        for block in blocks:
            node = block.node
            if node is None:
                continue
            use = node.use
            if use is None:
                use = self._remembered_use(node)
                if use is None:
                    num_added += 1
                    node.use = added
                    continue
            if use is not before:
                before, after = use, (use[0], now)
            node.use = after
        growth = _ADDED_POWER * log2(max(1, num_added))
        run: list[KVCacheBlock] = []
        run_level = _UNHASHED
        before = None
        own_level = level = _UNHASHED
        for block in blocks:
            node = block.node
            if node is None:
                level = _UNHASHED
            else:
                use = node.use
                assert use is not None
                if use is not before:
                    before = use
                    own_level = round(_LEVELS_PER_HALF_LIFE * (now + _USES_POWER * log2(use[0]) - growth))
                level = node.level = max(own_level, node.level)
                parent = node.parent
                assert parent is not None
                parent.level = max(parent.level, level)
            if level != run_level:
                self._append(run_level, run)
                run, run_level = [], level
            run.append(block)
        self._append(run_level, run)

    def add_first(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._append(_UNHASHED, blocks)

    def pop(self, count: int) -> list[KVCacheBlock]:
        if count > self._num_blocks:
            raise IndexError(f"{count} blocks wanted, {self._num_blocks} free")
        popped: list[KVCacheBlock] = []
        while len(popped) < count:
            level = self._heap[0]
            queue = self._queues.get(level)
            if queue is None:
                heappop(self._heap)
                continue
            popped += queue.pop(min(len(queue), count - len(popped)))
            if not len(queue):
                del self._queues[level]
        self._num_blocks -= count
        for block in popped:
            node = block.node
            if node is not None and node.num_blocks == 1:
                self._remember(node)
        self.now += count / self.half_life_blocks
        return popped

    def remove(self, blocks: Sequence[KVCacheBlock]) -> None:
        for block in blocks:
            queue = self._queues.get(block.level)
            if queue is None:
                raise ValueError(f"{block!r} is not free")
            queue.remove((block,))
            if not len(queue):
                del self._queues[block.level]
        self._num_blocks -= len(blocks)

    def hit(self, blocks: Sequence[KVCacheBlock]) -> None:
        before: Use | None = None
        after: Use = (2.0, self.now)
        node: PrefixNode | None = None
        num_near = num_far = 0
        is_far = False
        for block in blocks:
            if block.node is node:
                continue
            node = block.node
            # Who copied the beginning of a block will leave a longer one behind: the old one has served its turn.
            if node is None or node.block_hash is None:
                continue
            use = node.use
            if use is None:
                node.use = (2.0, self.now)
                continue
            if use is not before:
                before, after, is_far = use, self._used_again(use), self._is_far(use)
            node.use = after
            if is_far:
                num_far += 1
            else:
                num_near += 1
        self._learn(num_far - num_near)
        self.now += len(blocks) / self.half_life_blocks

    def reset(self) -> None:
        blocks = self.pop(len(self))
        self._remembered.clear()
        self._append(_UNHASHED, blocks)

    def _append(self, level: int, blocks: Sequence[KVCacheBlock]) -> None:
        if not blocks:
            return
        queue = self._queues.get(level)
        if queue is None:
            queue = self._queues[level] = FreeKVCacheBlockQueue()
            if len(self._heap) > 64 + 4 * len(self._queues):
                # Those that were emptied by hits, and never came up.
                self._heap = list(self._queues)
                heapify(self._heap)
            else:
                heappush(self._heap, level)
        for block in blocks:
            block.level = level
        queue.append(blocks)
        self._num_blocks += len(blocks)

    def _remembered_use(self, node: PrefixNode) -> Use | None:
        """That of content which was cached before and is made again; None if nothing is known of it."""
        use = None if node.block_hash is None else self._remembered.pop(node.block_hash, None)
        if use is None:
            return None
        self._learn(1 if self._is_far(use) else -1)
        return self._used_again(use)

    def _used_again(self, use: Use) -> Use:
        uses, used_at = use
        return 1.0 + uses * exp2((used_at - self.now) / _USES_HALF_LIFE), self.now

    def _is_far(self, use: Use) -> bool:
        return self.now - use[1] > _MEDIAN_GAP

    def _learn(self, num_farther: int) -> None:
        """So many more reuses came later than expected than came earlier."""
        self.half_life_blocks *= exp2(max(-1.0, min(1.0, num_farther * self._step)))

    def _remember(self, node: PrefixNode) -> None:
        """`node` loses its last block."""
        use, node.use = node.use, None
        if node.block_hash is None or use is None:
            return
        remembered = self._remembered
        if len(remembered) >= self._num_remembered:
            remembered.popitem(last=False)
        remembered[node.block_hash] = use


def make_eviction_order(policy: EvictionPolicy, blocks: Sequence[KVCacheBlock]) -> EvictionOrder:
    """All `blocks` are free, the first one given to be handed out first."""
    match policy:
        case "lru":
            return LruOrder(blocks)
        case "unhashed_first":
            return UnhashedFirstOrder(blocks)
        case "frequency":
            return FrequencyOrder(blocks, num_remembered=max(2 * len(blocks), 1 << 15))
    assert_never(policy)
