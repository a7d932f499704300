"""What is kept, slow enough to be obvious: who asked for which block, and since when nobody uses it.

`watch_retention` an engine: whenever its pool has done something, all blocks are compared. A block that is kept no
longer needs a good reason: its time is over, its own tenant wanted room for what matters more, a request that was alone
needed it, what it held was never computed, or the cache was reset.

It believes the engine nothing but which blocks it was asked to keep, and how many of them it says it keeps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from engine_core import EngineCore
from engine_core.kv_cache import KVCacheBlock
from engine_core.kv_cache.retention import SHARED_PRIORITY, KeepTerms
from engine_core.request import Request
from tests.engine_core.make import make_request


class WrongRetentionError(BaseException):
    """No `Exception`: an engine ends the requests of a step that raises one, and goes on."""


def check(is_right: bool, message: object) -> None:
    if not is_right:
        raise WrongRetentionError(message)


class Clock:
    """In seconds; stands still unless it is moved."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class _Before(NamedTuple):
    """How it was before the pool did something: who was kept, who of them was free, whose node it was."""

    kept: set[int]
    free: set[int]
    nodes: dict[int, Any]
    num_unkept_free: int


def joint(asks: Sequence[KeepTerms]) -> KeepTerms:
    """On what terms a block is kept for which all of these asked, in this order."""
    ttl_s = max(ask.ttl_s for ask in asks)
    tenant = next(ask.tenant for ask in asks if ask.ttl_s == ttl_s)
    is_shared = len({ask.tenant for ask in asks}) > 1
    return KeepTerms(tenant, ttl_s, SHARED_PRIORITY if is_shared else max(ask.priority for ask in asks))


class SlowRetention:
    """Attributes:
    allows_unfound: where hashes collide, what is kept may not be found.
    happened: how often: `kept` prefixes; `kept_in_part` of those; blocks that `expired`, were `displaced` or
        `given_up`; `shared` blocks of several tenants; prefixes `kept_again` after a preemption.
    """

    def __init__(self, engine: EngineCore, clock: Clock) -> None:
        self.engine = engine
        self.clock = clock
        self.kv = engine._scheduler.kv
        self.pool = self.kv.pool
        self.allows_unfound = False
        self.happened: Counter[str] = Counter()
        self._asks: dict[int, list[KeepTerms]] = {}
        self._freed_s: dict[int, float] = {}
        self._was_refused = False
        self._is_inside = False

    def watch(self) -> None:
        pool, kept = self.pool, self.pool.kept
        kept._clock = self.clock
        pool.keep = self._watched(pool.keep, self._after_keep)
        pool.release_expired = self._watched(pool.release_expired, self._after_release)
        pool.get_new_blocks = self._watched(pool.get_new_blocks, self._after_take)
        pool.touch = self._watched(pool.touch, self._after_touch)
        pool.free_blocks = self._watched(pool.free_blocks, self._after_free)
        pool.unregister = self._watched(pool.unregister, self._after_unregister)
        pool.reset = self._watched(pool.reset, self._after_reset)
        keep_prompt = self.kv.keep_prompt

        def watched_keep_prompt(request: Request) -> tuple[int, ...]:
            self._was_refused = False
            num_kept_tokens = keep_prompt(request)
            self._check_promise(request, num_kept_tokens)
            return num_kept_tokens

        self.kv.keep_prompt = watched_keep_prompt

    def _watched(self, operation: Callable[..., Any], after: Callable[..., None]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return operation(*args, **kwargs)
            if args and not isinstance(args[0], (int, Sequence)):
                args = list(args[0]), *args[1:]
            self._is_inside = True
            before = self._now()
            result = operation(*args, **kwargs)
            self._is_inside = False
            lost = before.kept - self._now().kept
            after(before, lost, result, *args)
            for block_id in lost:
                del self._asks[block_id]
            self.check()
            return result

        return watched

    def _now(self) -> _Before:
        blocks = self.pool.blocks
        return _Before(
            {block.block_id for block in blocks if block.keep is not None},
            {block.block_id for block in blocks if block.ref_cnt == 0},
            {block.block_id: block.node for block in blocks},
            sum(block.ref_cnt == 0 and block.keep is None for block in blocks),
        )

    def _terms(self, block_id: int) -> KeepTerms:
        return joint(self._asks[block_id])

    def _expires_s(self, block_id: int) -> float:
        return self._freed_s[block_id] + self._terms(block_id).ttl_s

    def _after_keep(
        self, before: _Before, lost: set[int], num_kept: int, blocks: Sequence[KVCacheBlock], terms: KeepTerms
    ) -> None:
        self._freed_s |= {block.block_id: self.clock.now_s for block in blocks if block.ref_cnt == 0}
        for block in blocks[:num_kept]:
            self._asks.setdefault(block.block_id, []).append(terms)
            self.happened["shared"] += self._terms(block.block_id).priority == SHARED_PRIORITY
        for block_id in lost:
            theirs = self._terms(block_id)
            check(theirs.tenant == terms.tenant and theirs.priority < terms.priority, f"{theirs} gave way to {terms}")
            check(block_id in before.free, "a block that is in use gave way")
        check(len(lost) <= num_kept, "more gave way than was kept")
        self.happened["displaced"] += len(lost)
        if num_kept < len(blocks):
            self._was_refused = True
            self._check_refusal(blocks, num_kept, terms)

    def _check_refusal(self, blocks: Sequence[KVCacheBlock], place: int, terms: KeepTerms) -> None:
        present = self._asks.get(blocks[place].block_id)
        wanted = joint([*present, terms]) if present else terms
        counts = self._counts(self._asks.keys())
        is_full = counts[wanted.tenant] >= self.pool.kept.max_tenant_blocks
        is_full |= present is None and sum(counts.values()) >= self.pool.kept.max_blocks
        check(is_full, f"{terms} were refused, though there is room")
        for other in self.pool.blocks:
            if other.ref_cnt == 0 and other.keep is not None and other not in blocks:
                theirs = self._terms(other.block_id)
                gives_way = theirs.tenant == wanted.tenant and theirs.priority < terms.priority
                check(not gives_way, f"{terms} were refused, though {theirs} could give way")

    def _counts(self, block_ids: Iterable[int]) -> Counter[str]:
        return Counter(self._terms(block_id).tenant for block_id in block_ids if block_id in self._asks)

    def _after_release(self, before: _Before, lost: set[int], _: None) -> None:
        over = {block_id for block_id in before.kept & before.free if self._expires_s(block_id) <= self.clock.now_s}
        check(lost == over, f"the time of {over} is over, kept no longer are {lost}")
        self.happened["expired"] += len(lost)

    def _after_take(self, before: _Before, lost: set[int], taken: list[KVCacheBlock], count: int) -> None:
        check(not self._asks.keys() - lost & {block.block_id for block in taken}, "a kept block was taken")
        broken = self._broken(before, lost)
        given_up = lost - broken
        if given_up:
            check(len(self.kv.tables) <= 1, f"{len(given_up)} kept blocks were given up for one of several requests")
            check(len(given_up) <= count - before.num_unkept_free, "more was given up than was needed")
            rank = {b: (self._terms(b).priority, self._expires_s(b)) for b in before.kept & before.free}
            spared = min((rank[b] for b in rank.keys() - lost), default=(SHARED_PRIORITY + 1, 0.0))
            check(max(rank[b] for b in given_up) <= spared, "what matters more was given up")
        self.happened["given_up"] += len(given_up)

    def _broken(self, before: _Before, lost: set[int]) -> set[int]:
        """Beginnings of blocks of which some group's part is gone."""
        return {
            block_id
            for block_id in lost
            if (node := before.nodes[block_id]) is not None and node.block_hash is None and node.num_blocks == 0
            if self.pool.blocks[block_id].ref_cnt == 0
        }

    def _after_touch(self, before: _Before, lost: set[int], *_: Any) -> None:
        check(not lost, "a block that is used is kept no longer")

    def _after_free(self, before: _Before, lost: set[int], _: None, blocks: Sequence[KVCacheBlock]) -> None:
        freed = {block.block_id for block in blocks if block.ref_cnt == 0}
        self._freed_s |= dict.fromkeys(freed, self.clock.now_s)
        unfindable = {block_id for block_id in freed if self.pool.blocks[block_id].node is None}
        check(lost == unfindable & before.kept, f"{lost} are kept no longer, but {unfindable} cannot be found")

    def _after_unregister(self, before: _Before, lost: set[int], *_: Any) -> None:
        check(all(self.pool.blocks[block_id].node is None for block_id in lost), "what can be found is kept no longer")

    def _after_reset(self, before: _Before, lost: set[int], _: None) -> None:
        check(lost == before.kept, "a reset left blocks that are kept")

    def _check_promise(self, request: Request, num_kept_tokens: tuple[int, ...]) -> None:
        check(len(num_kept_tokens) == len(request.keep), "every prefix is answered for")
        writes = self.kv.enable_caching and request.write_prefix_cache
        is_stale = self.kv.tables[request.request_id].is_stale
        self.happened["kept_again"] += request.num_preemptions > 0 and any(num_kept_tokens)
        for keep, num_kept in zip(request.keep, num_kept_tokens, strict=True):
            check(0 <= num_kept <= keep.num_tokens, f"{num_kept} tokens of {keep} are kept")
            check(writes or num_kept == 0, "what is not written cannot be kept")
            is_whole = num_kept == keep.num_tokens
            self.happened["kept"] += is_whole
            self.happened["kept_in_part"] += 0 < num_kept < keep.num_tokens
            self._check_is_found(request, num_kept)
            if (
                self.kv.windows == (None,)
                and writes
                and not is_stale
                and not self._was_refused
                and not self.allows_unfound
            ):
                most = keep.num_tokens
                if self.kv.match_unit == "block":
                    most = min(most, request.num_prompt_tokens // self.kv.block_size * self.kv.block_size)
                check(num_kept >= most, f"{num_kept} tokens of {keep} are kept, nothing was refused")

    def _check_is_found(self, request: Request, num_kept: int) -> None:
        """What goes on differently behind the kept tokens would find them, in blocks that are kept."""
        other = make_request("asks", [*request.token_ids[:num_kept], 1 << 31], extra_key_spans=request.extra_key_spans)
        self.engine._hash_blocks(other)
        hit = self.kv.get_computed_blocks(other)
        num_whole = num_kept // self.kv.block_size
        least = num_kept if self.kv.match_unit == "token" else num_whole * self.kv.block_size
        check(hit.num_tokens >= least or self.allows_unfound, f"{num_kept} tokens are kept, {hit.num_tokens} found")
        for blocks in hit.blocks:
            for block in blocks[:num_whole]:
                check(block is None or block.keep is not None or self.allows_unfound, "what is found is not kept")

    def check(self) -> None:
        """Everything is counted and in its place."""
        pool, kept = self.pool, self.pool.kept
        queued = [block.block_id for block in pool.free_queue]
        waiting = [block for block in pool.blocks if block.keep is not None and block.ref_cnt == 0]
        check(sorted(queued + [block.block_id for block in waiting]) == sorted(self._now().free), "free blocks")
        check(len(pool.free_queue) == len(queued) == pool.num_unkept_free_blocks, "the queue's length")
        check(kept.num_free_blocks == len(waiting) == pool.num_free_blocks - len(queued), "kept free blocks")
        check(all(block.node is not None for block in waiting), "a free block is kept that holds nothing")
        check(self._asks.keys() == self._now().kept, "kept blocks")
        counts = self._counts(self._asks)
        check(kept.num_blocks == sum(counts.values()) <= kept.max_blocks, "the share of all")
        check({name: tenant.num_blocks for name, tenant in kept._tenants.items()} == counts, "blocks of tenants")
        check(max(counts.values(), default=0) <= kept.max_tenant_blocks, "the share of a tenant")
        for block in pool.blocks:
            if block.keep is not None:
                check(block.keep.terms == self._terms(block.block_id), "terms")
                check((block.block_id in block.keep.blocks) == (block.ref_cnt == 0), "free blocks have a time")
                if block.ref_cnt == 0:
                    check(block.keep.expires_s == self._expires_s(block.block_id), "time")
        live = {id(block.keep) for block in waiting}
        check(kept._num_live_keeps == len(live), "live keeps")
        check(live <= {id(keep) for *_, keep in kept._expiries}, "whoever is kept expires")
        check(len(kept._expiries) <= 64 + 4 * pool.num_blocks, "the heap of all")


def watch_retention(engine: EngineCore, clock: Clock) -> SlowRetention:
    """Check everything that is kept by `engine`, whose kept blocks expire by `clock`, from now on."""
    retention = SlowRetention(engine, clock)
    retention.watch()
    return retention
