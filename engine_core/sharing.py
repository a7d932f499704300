"""Sharing in flight: a prefix that a running request is about to compute is not computed beside it.

A request that is looked at for admission, and whose next block is the very one that a running request, its *producer*,
will register next, waits aside for it. It holds nothing meanwhile, and does not stop those behind it. It is back in its
place as soon as the producer has registered the last block that both have in common, or does not run any more.

No wait is endless: a producer runs, so it gets on in every step in which anybody does, or gives way; and who has waited
`_MAX_WAITS_IN_VAIN` times without finding more cached than before (its producers were aborted, or what they left was
evicted) waits no more. There are no circles, since who waits does not run.

Blocks are compared by their hashes, extra keys and all: nobody can wait for, or learn of, a request of another salt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .kv_cache import KVCacheManager, PrefixHit
from .kv_cache.groups import first_visible_block
from .request import Request, RequestStatus

# A step looks at many requests that wait for one prefix, but not at all of ten thousand.
MAX_WAITS_PER_STEP = 64

_MAX_WAITS_IN_VAIN = 8


@dataclass(slots=True)
class _Group:
    """Those that wait until `producer` has registered `num_blocks` blocks, in the order they came."""

    producer: Request
    num_blocks: int
    waiters: dict[str, Request] = field(default_factory=dict)


@dataclass(slots=True)
class _History:
    """What a request found cached when it last began to wait, how often it found no more than before, for whom now."""

    num_hit_tokens: int
    num_in_vain: int = 0
    group: _Group | None = None


class SharingInFlight:
    """Who waits for whom; as long as there are waiters.

    Costs O(running) when a request is looked at, and O(waiters of different kinds) per step while there are any.
    """

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._groups: dict[tuple[str, int], _Group] = {}
        self._histories: dict[str, _History] = {}

    def __len__(self) -> int:
        return sum(len(group.waiters) for group in self._groups.values())

    def begin_wait(self, request: Request, hit: PrefixHit, running: Sequence[Request]) -> bool:
        """Whether `request`, which found `hit`, must wait until `take_ready` returns it."""
        producer = self._producer(request, hit, running)
        if producer is None:
            return False
        num_blocks = self._num_common_blocks(request, producer, hit.num_whole_blocks + 1)
        if not self._will_be_found(producer, hit.num_whole_blocks, num_blocks):
            return False
        history = self._histories.setdefault(request.request_id, _History(-1))
        history.num_in_vain += hit.num_tokens <= history.num_hit_tokens
        history.num_hit_tokens = hit.num_tokens
        if history.num_in_vain > _MAX_WAITS_IN_VAIN:
            return False
        key = producer.request_id, num_blocks
        history.group = self._groups.setdefault(key, _Group(producer, num_blocks))
        history.group.waiters[request.request_id] = request
        return True

    def take_ready(self) -> list[Request]:
        """Those that wait no longer. To be called in every step, before anybody is admitted."""
        ready: list[Request] = []
        for group in list(self._groups.values()):
            if not self._is_awaited(group):
                ready += group.waiters.values()
                for request in list(group.waiters.values()):
                    self._leave(request)
        return ready

    def forget(self, request: Request) -> None:
        """It is over. Those that wait for it are ready."""
        self._leave(request)
        self._histories.pop(request.request_id, None)

    def is_idle(self) -> bool:
        """Whether nothing is kept for any request."""
        return not self._groups and not self._histories

    def _leave(self, request: Request) -> None:
        history = self._histories.get(request.request_id)
        if history is None or history.group is None:
            return
        group, history.group = history.group, None
        del group.waiters[request.request_id]
        if not group.waiters:
            del self._groups[group.producer.request_id, group.num_blocks]

    def _producer(self, request: Request, hit: PrefixHit, running: Sequence[Request]) -> Request | None:
        if not request.read_prefix_cache:
            return None
        place = hit.num_whole_blocks
        if place >= self._num_findable_blocks(request) or hit.num_tokens == request.num_tokens - 1:
            return None
        next_hash = request.block_hashes[place]
        for producer in running:
            hashes = producer.block_hashes
            if len(hashes) > place and hashes[place] == next_hash:
                table = self._kv.tables[producer.request_id]
                if len(table.nodes) == place and table.is_registrable:
                    return producer
        return None

    def _num_findable_blocks(self, request: Request) -> int:
        num_tokens = request.num_tokens
        if self._kv.full_prompt_hit == "drop_last_block":
            num_tokens -= 1
        return num_tokens // self._kv.block_size

    def _num_common_blocks(self, request: Request, producer: Request, num_known: int) -> int:
        """By bisection: hashes are chained, so what is equal at one place is equal before it."""
        first, end = num_known, min(self._num_findable_blocks(request), len(producer.block_hashes))
        while first < end:
            middle = (first + end + 1) // 2
            if request.block_hashes[middle - 1] == producer.block_hashes[middle - 1]:
                first = middle
            else:
                end = middle - 1
        return first

    def _will_be_found(self, producer: Request, num_found: int, num_blocks: int) -> bool:
        """Whether a hit goes beyond `num_found` blocks once `producer` has registered `num_blocks`: not if it keeps
        only what the end of its own prompt sees.
        """
        kv, size = self._kv, self._kv.block_size
        if kv.window_retention == "all" or kv.windows == (None,):
            return True
        end = (producer.num_prompt_tokens - 1) // size
        reach = min(num_blocks, end)
        return reach > num_found and all(
            first_visible_block(window, reach * size, size) >= first_visible_block(window, end * size, size)
            for window in kv.windows
        )

    def _is_awaited(self, group: _Group) -> bool:
        if group.producer.status is not RequestStatus.RUNNING:
            return False
        table = self._kv.tables[group.producer.request_id]
        return len(table.nodes) < group.num_blocks and table.is_registrable
