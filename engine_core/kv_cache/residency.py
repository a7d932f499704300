"""How long cached blocks stay, and whether they are used again before they go: a sample of blocks is watched.

The measures are vLLM's (`--kv-cache-metrics`). They answer whether a larger pool would help: where blocks are evicted
soon after their last use, hits are being lost.
"""

from __future__ import annotations

import itertools
import random
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

from engine_core.config import EvictionPolicy
from ipc.stats import RESIDENCY_BOUNDS_S, Durations

from .block import KVCacheBlock
from .block_pool import BlockPool


class BlockResidency:
    """Watches each block with probability `sample_rate` from when it is taken until its content is evicted.

    Attributes:
        lifetime: from taking a block to evicting what was cached in it.
        idle_before_evict: from the last use to the eviction.
        reuse_gap: from one use of a cached block (or its taking) to the next.
    """

    def __init__(self, sample_rate: float) -> None:
        self._sample_rate = sample_rate
        self._random = random.Random()
        # Block id → when it was taken, when it was used last.
        self._watched: dict[int, tuple[float, float]] = {}
        self.lifetime = _Durations()
        self.idle_before_evict = _Durations()
        self.reuse_gap = _Durations()

    def taken(self, blocks: Iterable[KVCacheBlock], evicted_ids: Iterable[int]) -> None:
        """`blocks` have new owners; what was cached in those of `evicted_ids` among them is gone."""
        now_s = time.monotonic()
        for block_id in evicted_ids:
            if (times := self._watched.get(block_id)) is not None:
                taken_s, used_s = times
                self.lifetime.add(now_s - taken_s)
                self.idle_before_evict.add(now_s - used_s)
        for block in blocks:
            self._watched.pop(block.block_id, None)
            if self._random.random() < self._sample_rate:
                self._watched[block.block_id] = (now_s, now_s)

    def used(self, blocks: Iterable[KVCacheBlock]) -> None:
        """`blocks` were found in the cache."""
        now_s = time.monotonic()
        for block in blocks:
            if (times := self._watched.get(block.block_id)) is not None:
                taken_s, used_s = times
                self.reuse_gap.add(now_s - used_s)
                self._watched[block.block_id] = (taken_s, now_s)

    def forget(self) -> None:
        """The cache was reset: what is in the blocks was not evicted for want of room."""
        self._watched.clear()

    def durations(self) -> dict[str, Durations]:
        """All three, under the names of the metrics."""
        measures = {
            "lifetime": self.lifetime,
            "idle_before_evict": self.idle_before_evict,
            "reuse_gap": self.reuse_gap,
        }
        return {name: Durations(measure.counts.copy(), measure.sum_s) for name, measure in measures.items()}


class _Durations:
    def __init__(self) -> None:
        self.counts = [0] * (len(RESIDENCY_BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, duration_s: float) -> None:
        self.counts[bisect_left(RESIDENCY_BOUNDS_S, duration_s)] += 1
        self.sum_s += duration_s


class ObservedBlockPool(BlockPool):
    """A pool that tells `residency` what happens to its blocks."""

    def __init__(
        self,
        num_blocks: int,
        eviction_policy: EvictionPolicy,
        num_groups: int,
        *,
        residency: BlockResidency,
        **more: Any,
    ) -> None:
        """`more`: as `BlockPool`'s arguments by keyword."""
        super().__init__(num_blocks, eviction_policy, num_groups, **more)
        self._residency = residency

    def get_new_blocks(self, count: int) -> list[KVCacheBlock]:
        self._give_up_kept(count)
        first = itertools.islice(self.free_queue, count)
        evicted_ids = [block.block_id for block in first if block.node is not None]
        blocks = super().get_new_blocks(count)
        self._residency.taken(blocks, evicted_ids)
        return blocks

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        super().touch(blocks)
        self._residency.used(blocks)

    def reset(self) -> None:
        super().reset()
        self._residency.forget()
