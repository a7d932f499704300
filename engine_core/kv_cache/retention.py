"""Prefixes that are kept: cached blocks that are not handed out for a time, within a share of the pool.

A block is kept for one tenant, from when the prompt that asked for it is computed. Its time counts from its last use:
what a request references cannot be evicted anyway, so it begins when the block is free, and again each time.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from ipc.vocabulary import MAX_KEPT_PRIORITY, KeepPrefix

from .block import KVCacheBlock

# Of what several tenants asked for: it gives way to nobody's, or one could push out what it shares with another.
SHARED_PRIORITY = MAX_KEPT_PRIORITY + 1


class KeepTerms(NamedTuple):
    """For whom and how long a block is kept. Of one tenant's, those of lower `priority` are given up first."""

    tenant: str
    ttl_s: float
    priority: int


class Keep:
    """Free blocks that are kept on the same terms since the same time; the deepest first, if they are of one request.

    A referenced block still names the one it was in, for its terms.
    """

    __slots__ = ("blocks", "expires_s", "terms")

    def __init__(self, terms: KeepTerms, expires_s: float) -> None:
        self.terms = terms
        self.expires_s = expires_s
        self.blocks: dict[int, KVCacheBlock] = {}


class _Tenant:
    """`num_blocks` are kept for it, free or not. `keeps`: those of lowest priority that expire soonest come first."""

    __slots__ = ("keeps", "num_blocks")

    def __init__(self) -> None:
        self.num_blocks = 0
        self.keeps: list[tuple[int, float, int, Keep]] = []

    def first(self) -> Keep | None:
        """The next one to be given up."""
        while self.keeps and not self.keeps[0][3].blocks:
            heappop(self.keeps)
        return self.keeps[0][3] if self.keeps else None


class KeptBlocks:
    """Which blocks are kept, for whom and until when. Every operation is O(log keeps) for the blocks it is given
    together, besides O(1) for each; `give_up` looks at every tenant.

    Args:
        max_blocks: most that are kept at once.
        max_tenant_blocks: most of one tenant.

    Attributes:
        num_blocks: that are kept now; `num_free_blocks` of them are not referenced.
        num_refused_blocks: how many were not kept though asked for, since start; `num_given_up_blocks`: how many were
            given up before their time.
    """

    def __init__(self, max_blocks: int, max_tenant_blocks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_blocks = max_blocks
        self.max_tenant_blocks = max_tenant_blocks
        self._clock = clock
        self.num_blocks = 0
        self.num_free_blocks = 0
        self.num_refused_blocks = 0
        self.num_given_up_blocks = 0
        self._tenants: dict[str, _Tenant] = {}
        self._expiries: list[tuple[float, int, Keep]] = []
        self._num_live_keeps = 0
        self._serial = itertools.count()

    def keep(self, blocks: Sequence[KVCacheBlock], terms: KeepTerms) -> tuple[int, list[KVCacheBlock]]:
        """Keep `blocks`, which are referenced, on these terms or better ones, from the first one on as far as there is
        room.

        Returns how many of them are kept, and the free ones that gave way to them: of the same tenant and of lower
        priority.
        """
        keeps: dict[KeepTerms, Keep] = {}
        released: list[KVCacheBlock] = []
        for place, block in enumerate(blocks):
            present = block.keep
            joint = _joint_terms(terms, present)
            if present is not None and joint == present.terms:
                continue
            if not self._has_room(joint, present):
                gives_way = self._lowest(joint.tenant)
                if gives_way is None or gives_way.terms.priority >= terms.priority:
                    self.num_refused_blocks += sum(
                        other.keep is None or _joint_terms(terms, other.keep) != other.keep.terms
                        for other in blocks[place:]
                    )
                    return place, released
                released += self._take(gives_way, 1)
                self.num_given_up_blocks += 1
            self.forget(block)
            if joint not in keeps:
                keeps[joint] = Keep(joint, 0.0)
            block.keep = keeps[joint]
            self._count(joint.tenant, 1)
        return len(blocks), released

    def _has_room(self, terms: KeepTerms, present: Keep | None) -> bool:
        if present is None and self.num_blocks >= self.max_blocks:
            return False
        if present is not None and present.terms.tenant == terms.tenant:
            return True
        tenant = self._tenants.get(terms.tenant)
        return (0 if tenant is None else tenant.num_blocks) < self.max_tenant_blocks

    def _lowest(self, name: str) -> Keep | None:
        tenant = self._tenants.get(name)
        return None if tenant is None else tenant.first()

    def freed(self, blocks: Iterable[KVCacheBlock]) -> None:
        """The last reference of these kept blocks was dropped, of all at once: their time begins."""
        now_s = self._clock()
        keeps: dict[KeepTerms, Keep] = {}
        for block in blocks:
            assert block.keep is not None
            terms = block.keep.terms
            keep = keeps.get(terms)
            if keep is None:
                keep = keeps[terms] = Keep(terms, now_s + terms.ttl_s)
            keep.blocks[block.block_id] = block
            block.keep = keep
            self.num_free_blocks += 1
        for keep in keeps.values():
            self._push(keep)

    def _push(self, keep: Keep) -> None:
        self._num_live_keeps += 1
        serial = next(self._serial)
        heappush(self._expiries, (keep.expires_s, serial, keep))
        tenant = self._tenants[keep.terms.tenant]
        heappush(tenant.keeps, (keep.terms.priority, keep.expires_s, serial, keep))
        # Those whose blocks were all used again stay in the heaps until they come up.
        if len(self._expiries) > 64 + 4 * self._num_live_keeps:
            self._expiries = [entry for entry in self._expiries if entry[2].blocks]
            heapify(self._expiries)
        if len(tenant.keeps) > 64 + 4 * tenant.num_blocks:
            tenant.keeps = [entry for entry in tenant.keeps if entry[3].blocks]
            heapify(tenant.keeps)

    def touched(self, blocks: Iterable[KVCacheBlock]) -> None:
        """These kept blocks, free until now, are referenced again."""
        for block in blocks:
            self._leave(block)

    def forget(self, block: KVCacheBlock) -> None:
        """It is no longer kept, whether it is referenced or free."""
        keep = block.keep
        if keep is not None:
            if block.block_id in keep.blocks:
                self._leave(block)
            block.keep = None
            self._count(keep.terms.tenant, -1)

    def _leave(self, block: KVCacheBlock) -> None:
        keep = block.keep
        assert keep is not None
        del keep.blocks[block.block_id]
        self.num_free_blocks -= 1
        if not keep.blocks:
            self._num_live_keeps -= 1

    def _count(self, name: str, num_blocks: int) -> None:
        self.num_blocks += num_blocks
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant()
        tenant.num_blocks += num_blocks
        if tenant.num_blocks == 0:
            del self._tenants[name]

    def release_expired(self) -> list[KVCacheBlock]:
        """The free blocks whose time is over, which are kept no longer."""
        if not self._expiries:
            return []
        now_s = self._clock()
        released: list[KVCacheBlock] = []
        while self._expiries and self._expiries[0][0] <= now_s:
            _, _, keep = heappop(self._expiries)
            released += self._take(keep, len(keep.blocks))
        return released

    def num_overdue_blocks(self) -> int:
        """How many of the free blocks are kept only because nobody has released what expired. Any thread may ask."""
        now_s = self._clock()
        return sum(len(keep.blocks) for expires_s, _, keep in self._expiries.copy() if expires_s <= now_s)

    def give_up(self, num_blocks: int) -> list[KVCacheBlock]:
        """So many free kept blocks, which are kept no longer: those of lowest priority that would expire soonest, of
        all tenants. There must be as many.
        """
        firsts = [(tenant.keeps[0], tenant) for tenant in self._tenants.values() if tenant.first() is not None]
        heapify(firsts)
        released: list[KVCacheBlock] = []
        while len(released) < num_blocks:
            (*_, keep), tenant = heappop(firsts)
            released += self._take(keep, num_blocks - len(released))
            if tenant.first() is not None:
                heappush(firsts, (tenant.keeps[0], tenant))
        self.num_given_up_blocks += len(released)
        return released

    def _take(self, keep: Keep, num_blocks: int) -> list[KVCacheBlock]:
        """The deepest blocks of `keep`."""
        taken = list(itertools.islice(keep.blocks.values(), num_blocks))
        for block in taken:
            self.forget(block)
        return taken


def _joint_terms(terms: KeepTerms, present: Keep | None) -> KeepTerms:
    """On what terms a block is kept that is kept as at present and is to be on `terms`, too: the best of each. It
    counts to who keeps it longer, of equals to who came first.
    """
    if present is None:
        return terms
    theirs = present.terms
    tenant, priority = theirs.tenant, max(terms.priority, theirs.priority)
    if terms.tenant != tenant:
        priority = SHARED_PRIORITY
        if terms.ttl_s > theirs.ttl_s:
            tenant = terms.tenant
    return KeepTerms(tenant, max(terms.ttl_s, theirs.ttl_s), priority)


def spans_of_terms(keeps: Sequence[KeepPrefix], tenant: str, block_size: int) -> list[tuple[int, int, KeepTerms]]:
    """Blocks `[first, end)` of a prompt, ascending, and how they are kept: on the best terms of all that cover them."""
    spans = []
    first = 0
    for num_tokens in sorted({keep.num_tokens for keep in keeps}):
        covering = [keep for keep in keeps if keep.num_tokens >= num_tokens]
        terms = KeepTerms(tenant, max(keep.ttl_s for keep in covering), max(keep.priority for keep in covering))
        end = -(-num_tokens // block_size)
        if end > first:
            spans.append((first, end, terms))
            first = end
    return spans
