"""A prefix cache slow enough to be obvious: what every slot of the pool holds, and how long a hit may therefore be.

`watch` an engine that drives a `WatchedRunner`: whenever a request is admitted, the reference looks at all slots of all
blocks for the longest hit there could be, and an engine that found a longer or a shorter one is a `WrongHitError`.

It believes the engine nothing but the block tables: a block that appears in one, unless shared, lost what it held; a
slot holds a token from when a step that wrote it, or copied it, has run. What a request that writes nothing computes,
and what comes of a table from before a reset, may never be found; what was lost by a reset need not be.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine_core import EngineCore
from engine_core.kv_cache.block_table import BlockTable
from engine_core.request import Request, RequestStatus
from engine_core.runner import LaunchedStep, ScheduledRequest, SlotCopy, StepResult
from engine_core.step import Step
from tests.checking_runner import CheckingRunner

# The identity of a token with everything before it, extra keys included. 0 is that of no token.
PrefixId = int
# For a token: whose copies of it there are → in which groups.
Sources = dict[PrefixId, dict[object, set[int]]]


class WrongHitError(BaseException):
    """No `Exception`: an engine ends the requests of a step that raises one, and goes on."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """What a request may find: `least` to `most` tokens, and `least_blocks` to `most_blocks` in whole blocks.

    The bounds differ where a step has written slots of a request that was ended while it ran, where the groups'
    blocks of one beginning are those of several requests, and where a request fills a block and has given up the one
    before it, as with windows smaller than a block: nobody has to know that.

    `shared_with_parent` is what another continuation of a prompt gets from the first, which still runs.
    """

    least: int
    most: int
    least_blocks: int
    most_blocks: int
    may_lack_room: bool
    shared_with_parent: int | None = None


class SlowCache:
    """Compares the hits of `engine` with its own; nothing is cached yet.

    Attributes:
        allows_shorter_hits: where hashes collide, hits may be lost.
        happened: how often: `admissions`; of those `partial_hits`, which end within a block, `full_hits` of all but the
            last token by reference, `hits_of_the_same_step`, which share a block that it writes, `hits_in_windows`, of
            which some blocks were not needed; `dropped_partial_hits` for want of room, `lost_hits`.
    """

    def __init__(self, engine: EngineCore) -> None:
        self.engine = engine
        self.kv = engine._scheduler.kv
        self.block_size = engine.config.block_size
        self.windows = engine.runner.info.windows
        num_blocks = engine.runner.info.num_blocks
        self.happened: Counter[str] = Counter()
        self.allows_shorter_hits = False
        self._ids: dict[object, PrefixId] = {}
        # Per block: the group it is of, and what its first slots hold for certain, and at most.
        self._group = [0] * num_blocks
        self._owner: list[tuple[BlockTable, int] | None] = [None] * num_blocks
        self._least: list[list[PrefixId]] = [[] for _ in range(num_blocks)]
        self._most: list[list[PrefixId]] = [[] for _ in range(num_blocks)]
        self._times_taken = [0] * num_blocks
        self._known_tables: dict[str, tuple[BlockTable, list[int]]] = {}
        self._filled_in_step: dict[int, tuple[Request, BlockTable, PrefixId]] = {}
        self._lookups: dict[str, Lookup] = {}
        # Requests of which nobody may find anything, and tables that hold what was computed before a reset.
        self.silent: set[str] = set()
        self._stale_tables: list[BlockTable] = []

    def prefix_ids(self, request: Request) -> list[PrefixId]:
        """Of each token."""
        ids: list[PrefixId] = []
        last = 0
        for position, token_id in enumerate(request.token_ids):
            keys = sorted(
                (span.kind, repr(span.key), position - span.start)
                for span in request.extra_key_spans
                if span.start <= position and (span.end is None or position < span.end)
            )
            last = self._ids.setdefault((last, token_id, tuple(keys)), len(self._ids) + 1)
            ids.append(last)
        return ids

    # What an engine does with its blocks.

    def look_up(self, request: Request, num_new_tokens: int, num_spare_blocks: int, reserve: bool) -> None:
        """The engine is about to admit `request`, if there is room."""
        lookup = self._look_up(request, num_new_tokens, num_spare_blocks, reserve)
        if self._shares_its_parent(request):
            lookup = replace(lookup, shared_with_parent=request.num_prompt_tokens - 1)
        self._lookups[request.request_id] = lookup

    def _look_up(self, request: Request, num_new_tokens: int, num_spare_blocks: int, reserve: bool) -> Lookup:
        config, num_tokens = self.engine.config, request.num_tokens
        if not config.enable_prefix_caching or not request.read_prefix_cache:
            return Lookup(0, 0, 0, 0, False)
        ids = self.prefix_ids(request)
        least, least_blocks = self._longest(ids, self._least, self._least_sources())
        most, most_blocks = self._longest(ids, self._most, None)
        may_lack_room = False
        if least > least_blocks:
            end = num_tokens if reserve else least + num_new_tokens
            needed = num_spare_blocks + self._most_blocks_needed(ids, least, end, reserve)
            pool = self.kv.pool
            may_lack_room = (pool.num_unkept_free_blocks if self.kv.tables else pool.num_free_blocks) < needed
        return Lookup(least, most, least_blocks, most_blocks, may_lack_room)

    def _longest(
        self, ids: Sequence[PrefixId], slots: Sequence[Sequence[PrefixId]], sources: Sources | None
    ) -> tuple[int, int]:
        """The longest hit, and the longest in whole blocks, if the blocks hold `slots`."""
        shareable = {(self._group[block], last) for block, (*_, last) in self._filled_in_step_now()}
        shareable |= {
            (self._group[block], holds[-1]) for block, holds in enumerate(slots) if len(holds) == self.block_size
        }
        in_blocks = next(end for end in self._block_ends(len(ids)) if self._can_share(end, ids, shareable))
        if not self._matches_tokens:
            return in_blocks, in_blocks
        if sources is None:
            sources = {}
            for block, holds in enumerate(slots):
                for held in holds:
                    sources.setdefault(held, {}).setdefault("any", set()).add(self._group[block])
        for end in range(len(ids) - 1, in_blocks, -1):
            if end % self.block_size == 0:
                continue
            copyable = any(len(groups) == len(self.windows) for groups in sources.get(ids[end - 1], {}).values())
            if copyable and self._can_share(end, ids, shareable, copies_last=True):
                return end, in_blocks
        return in_blocks, in_blocks

    def _least_sources(self) -> Sources:
        """What can be copied, by whose beginning of a block it is: one prefix's, or one request's."""
        sources: Sources = {}
        for block, holds in enumerate(self._least):
            owner, is_full = self._owner[block], len(holds) == self.block_size
            if not is_full and owner is not None and self._is_cut_off(*owner):
                continue
            whose = holds[-1] if is_full else owner
            for held in holds:
                sources.setdefault(held, {}).setdefault(whose, set()).add(self._group[block])
        return sources

    def _is_cut_off(self, table: BlockTable, index: int) -> bool:
        """Whether a request that runs on has filled block `index` in part and does not keep the block before it."""
        request = table.request
        if index == 0 or self.kv.tables.get(request.request_id) is not table:
            return False
        return not any(
            self.is_kept(request, group, index - 1)
            and self._first_seen(group, request.num_computed_tokens) < index * self.block_size
            for group in range(len(self.windows))
        )

    def allocated(self, request: Request, start: int, end: int) -> None:
        """`request` got slots for `[start, end)`: whatever was in the blocks that are new in its tables is gone."""
        table = self.kv.tables[request.request_id]
        known, lengths = self._known_tables.get(request.request_id, (None, []))
        if known is not table:
            lengths = [table.num_shared_blocks] * len(self.windows)
            if self._continues_stale_table(request, table, start):
                self._stale_tables.append(table)
        ids = self.prefix_ids(request)
        for group, blocks in enumerate(table.block_tables):
            for place, block in enumerate(blocks[lengths[group] :]):
                self._group[block] = group
                self._owner[block] = (table, lengths[group] + place)
                self._least[block], self._most[block] = [], []
                self._times_taken[block] += 1
                self._filled_in_step.pop(block, None)
            first = max(table.num_shared_blocks, start // self.block_size)
            for index in range(first, min(end, request.num_tokens) // self.block_size):
                if self.may_be_found(request, table) and self.is_kept(request, group, index):
                    self._filled_in_step[blocks[index]] = (request, table, ids[(index + 1) * self.block_size - 1])
        self._known_tables[request.request_id] = (table, [len(blocks) for blocks in table.block_tables])

    def is_kept(self, request: Request, group: int, index: int) -> bool:
        """Whether block `index` stays in the cache once it is full."""
        if self.windows[group] is None or self.engine.config.window_retention == "all":
            return True
        end = (request.num_prompt_tokens - 1) // self.block_size
        return self._first_seen(group, end * self.block_size) // self.block_size <= index < end

    def may_be_found(self, request: Request, table: BlockTable) -> bool:
        """What a step writes for `request` in `table`."""
        return request.output_id not in self.silent and not any(table is stale for stale in self._stale_tables)

    def _continues_stale_table(self, request: Request, table: BlockTable, start: int) -> bool:
        """Whether it begins with blocks, or a copy, of a parent that has them from before a reset."""
        parent = request.parent
        theirs = None if parent is None else self.kv.tables.get(parent.request_id)
        if theirs is None or not any(theirs is stale for stale in self._stale_tables):
            return False
        sources = {copy.source for copy in self.kv.copies_for(request)}
        shared = {block for blocks in table.block_tables for block in blocks[: table.num_shared_blocks]}
        return bool((sources | shared) & {block for blocks in theirs.block_tables for block in blocks})

    def forget(self) -> None:
        """The cache was reset."""
        self._stale_tables = list(self.kv.tables.values())
        for block in range(len(self._group)):
            self._least[block], self._most[block] = [], []
            self._times_taken[block] += 1
        self._filled_in_step.clear()

    def begin_step(self) -> None:
        self._lookups.clear()

    # What its runner is told.

    def launched(self, batch: Sequence[ScheduledRequest], copies: Sequence[SlotCopy]) -> PendingStep:
        for entry in batch:
            lookup = self._lookups.pop(entry.request.request_id, None)
            if lookup is not None:
                self._compare(entry, lookup)
        return PendingStep(self, batch, copies)

    def _compare(self, entry: ScheduledRequest, lookup: Lookup) -> None:
        start, num_tokens = entry.start, entry.request.num_tokens
        self.happened["admissions"] += 1
        is_whole = entry.num_shared_blocks * self.block_size == num_tokens and start == num_tokens - 1
        self.happened["full_hits"] += is_whole
        self.happened["partial_hits"] += not is_whole and start % self.block_size > 0
        if not is_whole and entry.num_shared_blocks != start // self.block_size:
            raise WrongHitError(f"{entry.request} starts at {start} behind {entry.num_shared_blocks} shared blocks")
        self.happened["hits_in_windows"] += any(
            self._first_seen(group, start) >= self.block_size for group in range(len(self.windows))
        )
        filled = {block for block, _ in self._filled_in_step_now()}
        self.happened["hits_of_the_same_step"] += any(
            block in filled for table in entry.block_tables for block in table[: entry.num_shared_blocks]
        )
        if start == lookup.shared_with_parent:
            return
        if lookup.shared_with_parent is not None and self.windows == (None,) and not self.allows_shorter_hits:
            raise WrongHitError(f"{entry.request} found {start} tokens of the {lookup} that its parent has")
        if start > lookup.most:
            raise WrongHitError(f"{entry.request} found {start} tokens, but there are only {lookup.most}: {lookup}")
        if start >= lookup.least:
            return
        if lookup.may_lack_room and lookup.least_blocks <= start <= lookup.most_blocks:
            self.happened["dropped_partial_hits"] += 1
        elif self.allows_shorter_hits:
            self.happened["lost_hits"] += 1
        else:
            raise WrongHitError(f"{entry.request} found {start} tokens of {lookup.least}: {lookup}")

    # What there is.

    @property
    def _matches_tokens(self) -> bool:
        return self.engine.config.prefix_match_unit == "token"

    def _shares_its_parent(self, request: Request) -> bool:
        parent = request.parent
        return (
            parent is not None
            and request.status is RequestStatus.WAITING
            and parent.status is RequestStatus.RUNNING
            and parent.num_preemptions == 0
        )

    def _filled_in_step_now(self) -> Iterator[tuple[int, tuple[Request, BlockTable, PrefixId]]]:
        for block, filled in self._filled_in_step.items():
            request, table, _ = filled
            if self.kv.tables.get(request.request_id) is table:
                yield block, filled

    def _first_seen(self, group: int, end: int) -> int:
        """The first position that the token at `end` sees."""
        window = self.windows[group]
        return 0 if window is None else max(0, end - window + 1)

    def _block_ends(self, num_tokens: int) -> Iterator[int]:
        """Where a hit in whole blocks may end, the longest first."""
        drops_last = self.engine.config.full_prompt_hit == "drop_last_block"
        if num_tokens % self.block_size == 0 and not drops_last:
            yield num_tokens - 1
        yield from range((num_tokens - 1) // self.block_size * self.block_size, -1, -self.block_size)

    def _can_share(
        self, end: int, ids: Sequence[PrefixId], shareable: set[tuple[int, PrefixId]], *, copies_last: bool = False
    ) -> bool:
        """Whether the blocks that tokens from `end` on see are there; with `copies_last` those before the last."""
        last = end // self.block_size if copies_last else -(-end // self.block_size)
        return all(
            (group, ids[(index + 1) * self.block_size - 1]) in shareable
            for group in range(len(self.windows))
            for index in range(self._first_seen(group, end) // self.block_size, last)
        )

    def _may_be_free(self, held: PrefixId) -> bool:
        blocks = self.kv.pool.blocks
        return any(held in holds and blocks[block].ref_cnt == 0 for block, holds in enumerate(self._most))

    def _most_blocks_needed(self, ids: Sequence[PrefixId], hit: int, end: int, reserve: bool) -> int:
        """For a hit that ends within a block, if the free ones of several copies are taken, and room up to `end`."""
        num_whole, num_groups = hit // self.block_size, len(self.windows)
        num_in_all = -(-end // self.block_size) * num_groups
        sources = num_groups * self._may_be_free(ids[hit - 1])
        if reserve and self.windows != (None,):
            # What leaves the windows may be counted, too.
            return num_in_all + sources
        needed = num_in_all - num_whole * num_groups + sources
        for group in range(num_groups):
            for index in range(self._first_seen(group, hit) // self.block_size, num_whole):
                needed += self._may_be_free(ids[(index + 1) * self.block_size - 1])
        return needed


class PendingStep:
    """What will be in the slots when a step has run."""

    def __init__(self, cache: SlowCache, batch: Sequence[ScheduledRequest], copies: Sequence[SlotCopy]) -> None:
        self._cache = cache
        self._filled = dict(cache._filled_in_step)
        copied = {copy.target: copy for copy in copies}
        # Request, its table, group, block, how often that was taken, first position, number of tokens.
        self._writes: list[tuple[Request, BlockTable, int, int, int, int, int]] = []
        for entry in batch:
            table, _ = cache._known_tables[entry.request.request_id]
            for group, blocks in enumerate(entry.block_tables):
                for index in range(entry.start // cache.block_size, -(-entry.end // cache.block_size)):
                    if index < entry.num_shared_blocks:
                        continue
                    block = blocks[index]
                    first = max(entry.start, index * cache.block_size)
                    end = min(entry.end, (index + 1) * cache.block_size)
                    if first == entry.start and block in copied and not cache._least[block]:
                        first -= copied[block].num_slots
                    times_taken = cache._times_taken[block]
                    self._writes.append((entry.request, table, group, block, times_taken, first, end - first))

    def completed(self) -> None:
        cache = self._cache
        for request, table, group, block, times_taken, first, num_tokens in self._writes:
            if cache._times_taken[block] != times_taken:
                continue
            if not cache.may_be_found(request, table):
                continue
            ids = cache.prefix_ids(request)[first : first + num_tokens]
            is_unended = cache.kv.tables.get(request.request_id) is table
            for slots in (cache._least, cache._most) if is_unended else (cache._most,):
                if len(slots[block]) == first % cache.block_size:
                    slots[block] += ids
            is_full = len(cache._most[block]) == cache.block_size
            if is_full and not cache.is_kept(request, group, first // cache.block_size):
                cache._least[block] = []
                if is_unended:
                    cache._most[block] = []
        self.failed()

    def failed(self) -> None:
        for block, filled in self._filled.items():
            if self._cache._filled_in_step.get(block) is filled:
                del self._cache._filled_in_step[block]


@dataclass(frozen=True)
class WatchedStep:
    step: LaunchedStep
    pending: PendingStep

    def wait(self) -> StepResult:
        try:
            result = self.step.wait()
        except Exception:
            self.pending.failed()
            raise
        self.pending.completed()
        return result


class WatchedRunner(CheckingRunner):
    """A `CheckingRunner` that shows a `SlowCache` what it is told."""

    cache: SlowCache | None = None
    _copies: Sequence[SlotCopy] = ()

    def copy_slots(self, copies: Sequence[SlotCopy]) -> None:
        super().copy_slots(copies)
        self._copies = copies

    def launch(self, batch: Sequence[ScheduledRequest]) -> LaunchedStep:
        copies, self._copies = self._copies, ()
        if self.cache is None:
            return super().launch(batch)
        pending = self.cache.launched(batch, copies)
        try:
            return WatchedStep(super().launch(batch), pending)
        except Exception:
            pending.failed()
            raise


def watch(engine: EngineCore) -> SlowCache:
    """Compare every hit of `engine`, whose runner is a `WatchedRunner`, from now on; nothing is cached yet."""
    assert isinstance(engine.runner, WatchedRunner)
    cache = engine.runner.cache = SlowCache(engine)
    kv = engine._scheduler.kv
    allocate_slots, reset_prefix_cache = kv.allocate_slots, kv.reset_prefix_cache
    schedule = engine._scheduler.schedule
    signature = inspect.signature(allocate_slots)

    def watched_allocation(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        request: Request = given["request"]
        is_new = request.request_id not in kv.tables
        if is_new and request.request_id not in cache._lookups:
            cache.look_up(
                request, given["num_new_tokens"], given["num_spare_blocks"], bool(given["reserve_full_sequence"])
            )
        allocated = allocate_slots(*args, **kwargs)
        if allocated is not None:
            start = (given["hit"].num_tokens if given["hit"] else 0) if is_new else request.num_computed_tokens
            cache.allocated(request, start, start + given["num_new_tokens"])
        return allocated

    def watched_schedule() -> Step:
        cache.begin_step()
        return schedule()

    def watched_reset() -> None:
        reset_prefix_cache()
        cache.forget()

    kv.allocate_slots = watched_allocation
    engine._scheduler.schedule = watched_schedule
    kv.reset_prefix_cache = watched_reset
    return cache
