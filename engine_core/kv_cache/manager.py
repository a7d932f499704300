"""Block tables of all requests: who finds which prefix, who gets which blocks, and who gives them back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from engine_core.config import EvictionPolicy, FullPromptHit, PrefixMatchUnit, WindowRetention
from engine_core.request import Request
from engine_core.runner import SlotCopy
from ipc.vocabulary import MissReason

from .block import KVCacheBlock
from .block_content import content_between
from .block_pool import BlockPool
from .block_table import BlockTable
from .groups import first_visible_block, most_blocks
from .kept_prompt import Column, blocks_to_keep, num_kept_tokens
from .miss_reason import examine_miss
from .partial_blocks import PartialBlocks
from .prefix_hit import PrefixHit, Tail, find_hit, num_whole_blocks
from .prefix_tree import PrefixTree
from .registrations import Registrations
from .residency import BlockResidency, ObservedBlockPool
from .retention import spans_of_terms
from .shortage import Shortage


def _find_no_tail(num_whole: int) -> None:
    return None


class KVCacheManager:
    """Gives requests their slots and remembers which blocks hold which prefix.

    A block is registered when the step that fills it is *scheduled*, so that another request of the same step can
    share it, or as soon as its tokens are known if that is later; until `commit_step` that is provisional, and
    `withdraw`, for all requests `withdraw_step`, undoes it. Slots are copied only if a step that has run wrote them.

    Args:
        windows: of each KV cache group, how many tokens its layers see; None is all.
        max_step_tokens: most tokens that one request computes in a step; only sequences with windows depend on it.
        match_unit: with `token`, the beginning of a block is found, too, and copied; with `block`, whole blocks only.
        max_kept_share, max_kept_share_per_tenant, clock: as `BlockPool`'s.
        window_retention: what groups with a window keep for lookups: all blocks, or, of a prompt alone, those that the
            longest hit of the same prompt needs.
        tree: what remembers what is cached, of as many groups; default a plain one.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        windows: Sequence[int | None] = (None,),
        max_step_tokens: int = 1,
        enable_caching: bool = True,
        match_unit: PrefixMatchUnit = "token",
        full_prompt_hit: FullPromptHit = "recompute_last_token",
        eviction_policy: EvictionPolicy = "lru",
        window_retention: WindowRetention = "all",
        residency: BlockResidency | None = None,
        max_kept_share: float = 0.5,
        max_kept_share_per_tenant: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
        tree: PrefixTree | None = None,
    ) -> None:
        self.block_size = block_size
        self.windows = tuple(windows)
        self._has_windows = any(window is not None for window in windows)
        self.max_step_tokens = max_step_tokens
        self.enable_caching = enable_caching
        self.match_unit: PrefixMatchUnit = match_unit
        self.full_prompt_hit: FullPromptHit = full_prompt_hit
        self.window_retention: WindowRetention = window_retention
        make_pool = BlockPool if residency is None else partial(ObservedBlockPool, residency=residency)
        self.pool = make_pool(
            num_blocks,
            eviction_policy,
            len(self.windows),
            max_kept_share=max_kept_share,
            max_kept_share_per_tenant=max_kept_share_per_tenant,
            clock=clock,
            tree=tree,
        )
        self.tables: dict[str, BlockTable] = {}
        self._registrations = Registrations(self.pool, block_size, self.windows, window_retention)
        self._partial = PartialBlocks(self.pool, block_size, self.tables, self._registrations)
        self._shortage = Shortage(self.pool, self.windows)
        self._no_hit = PrefixHit((), [()] * len(self.windows), 0)

    def get_computed_blocks(self, request: Request, *, whole_blocks_only: bool = False) -> PrefixHit:
        """The longest cached prefix of the sequence, or the longest that takes no copy. Changes nothing."""
        if not self.enable_caching or not request.read_prefix_cache:
            return self._no_hit
        num_tokens = request.num_tokens
        hashes = request.block_hashes
        if self.full_prompt_hit == "drop_last_block" and len(hashes) * self.block_size == num_tokens:
            hashes = hashes[:-1]
        path = self.pool.tree.walk(hashes, request.block_contents)
        copies = self.match_unit == "token" and not whole_blocks_only
        find_tail = partial(self._partial.find, request, path) if copies else _find_no_tail
        return find_hit(path, num_tokens, self.windows, self.block_size, find_tail)

    def why_missed(self, request: Request, hit: PrefixHit) -> MissReason:
        """Why `hit`, just found and not yet allocated, is no longer; see `miss_reason`."""
        return examine_miss(self, request, hit).reason

    def most_hit_tokens(self, request: Request) -> int:
        """How long a hit can be, whatever is cached: some of the request has to be computed."""
        if self.full_prompt_hit == "drop_last_block" and request.num_tokens % self.block_size == 0:
            return request.num_tokens - self.block_size
        return request.num_tokens - 1

    def get_forked_blocks(self, request: Request, parent: Request) -> PrefixHit | None:
        """All but the last token of a prompt that `parent`, which holds blocks, has computed whole. Changes nothing.

        None if `parent` is so far that it has given back what these tokens see.
        """
        table = self.tables[parent.request_id]
        num_hit_tokens = request.num_prompt_tokens - 1
        num_full = request.num_prompt_tokens // self.block_size
        num_slots = num_hit_tokens - num_full * self.block_size
        blocks: list[list[KVCacheBlock | None]] = []
        for group, window in enumerate(self.windows):
            first = first_visible_block(window, num_hit_tokens, self.block_size)
            if table.num_given_back[group] > first:
                return None
            unseen: list[KVCacheBlock | None] = [None] * first
            blocks.append(unseen + table.blocks[group][first:num_full])
        tail = None
        if num_slots > 0:
            start = num_full * self.block_size
            content = content_between(request, start, start + num_slots, self.block_size)
            tail = Tail(table.at(num_full), num_slots, content)
        return PrefixHit(table.nodes[:num_full], blocks, num_hit_tokens, tail, table.is_stale)

    def still_lacks_room(self, request: Request, num_spare_blocks: int = 0) -> bool:
        """Whether `allocate_slots` with `reserve_full_sequence`, refused to this request before, would be again.

        O(1), without a lookup; False says nothing.
        """
        return self._shortage.lasts(request, num_spare_blocks, spares_kept=bool(self.tables))

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        hit: PrefixHit | None = None,
        *,
        reserve_full_sequence: bool = False,
        num_spare_blocks: int = 0,
    ) -> list[KVCacheBlock] | None:
        """Make room for `num_new_tokens` more tokens after those computed, and register the blocks they fill.

        `hit` is given when the request has no table yet: its blocks become the head of the table, and what its tail
        has is to be copied (`copies_for`). Returns the newly taken blocks, group after group, or None if they would
        leave fewer than `num_spare_blocks` free or, with `reserve_full_sequence`, if the rest of the sequence would not
        fit either. Then nothing has changed, but that blocks out of all windows were given back. Blocks that are kept
        are given up only for a request that alone has a table.
        """
        table = self.tables.get(request.request_id)
        if table is None:
            return self._admit(request, num_new_tokens, hit or self._no_hit, reserve_full_sequence, num_spare_blocks)
        if self._has_windows:
            self._give_back_unseen(table)
        num_tokens = request.num_computed_tokens + num_new_tokens
        num_needed = -(-num_tokens // self.block_size) - len(table.block_tables[0])
        if num_needed > 0:
            num_needed *= len(self.windows)
            if num_needed + num_spare_blocks > self._num_takeable_blocks(spares_kept=len(self.tables) > 1):
                return None
        return self._extend(table, num_needed, num_tokens)

    def _admit(
        self, request: Request, num_new_tokens: int, hit: PrefixHit, reserve_full_sequence: bool, num_spare_blocks: int
    ) -> list[KVCacheBlock] | None:
        touched = hit.touched()
        num_tokens = hit.num_tokens + num_new_tokens
        num_needed = (-(-num_tokens // self.block_size) - hit.num_whole_blocks) * len(self.windows)
        num_required = num_needed
        if reserve_full_sequence:
            num_in_all = most_blocks(self.windows, request.num_tokens, self.block_size, self.max_step_tokens)
            num_required = max(num_needed, num_in_all - len(touched))
        sources = () if hit.tail is None else hit.tail.blocks
        spares_kept = bool(self.tables)
        num_required += num_spare_blocks + self._num_taken_by(touched, spares_kept)
        num_lacking = num_required - self._num_takeable_blocks(spares_kept)
        if num_lacking + self._num_taken_by(sources, spares_kept) > 0:
            if reserve_full_sequence:
                self._shortage.note(request, num_lacking, num_spare_blocks, hit, spares_kept=spares_kept)
            return None
        self._shortage.end()
        self.pool.touch([*touched, *sources])
        table = self.tables[request.request_id] = BlockTable(request, hit.nodes, hit.blocks, hit.is_stale)
        table.is_registrable &= self.enable_caching
        new_blocks = self._extend(table, num_needed, num_tokens)
        if hit.tail is not None:
            self._partial.begin_copies(request, hit.tail, table.at(hit.num_whole_blocks))
        return new_blocks

    def _num_takeable_blocks(self, spares_kept: bool) -> int:
        return self.pool.num_unkept_free_blocks if spares_kept else self.pool.num_free_blocks

    @staticmethod
    def _num_taken_by(hit: Sequence[KVCacheBlock], spares_kept: bool) -> int:
        """Of the blocks of a hit, how many could have been taken otherwise."""
        if spares_kept:
            return len([block for block in hit if block.ref_cnt == 0 and block.keep is None])
        return len([block for block in hit if block.ref_cnt == 0])

    def _extend(self, table: BlockTable, num_needed: int, num_tokens: int) -> list[KVCacheBlock]:
        new_blocks: list[KVCacheBlock] = []
        if num_needed > 0:
            new_blocks = self.pool.get_new_blocks(num_needed)
            share = num_needed // len(self.windows)
            for group in range(len(self.windows)):
                table.extend(group, new_blocks[group * share : (group + 1) * share])
        # A decode fills no block in most of its steps.
        if num_tokens // self.block_size > len(table.nodes):
            self._registrations.register(table, num_tokens)
        return new_blocks

    def _give_back_unseen(self, table: BlockTable) -> None:
        for group, window in enumerate(self.windows):
            if window is not None:
                first = first_visible_block(window, table.request.num_computed_tokens, self.block_size)
                self._free(table, table.give_back(group, first))

    def _free(self, table: BlockTable, blocks: Iterable[KVCacheBlock]) -> None:
        is_of_no_use = table.is_stale or not table.request.write_prefix_cache
        self.pool.free_blocks(blocks, to_be_taken_first=is_of_no_use)

    def copies_for(self, request: Request) -> Sequence[SlotCopy]:
        """What has to be copied before the step in which the request was just admitted."""
        return self._partial.copies_for(request)

    def register_known(self, request: Request) -> None:
        """Steps that have run or are running compute all tokens of the request: register the blocks they fill."""
        self._registrations.register(self.tables[request.request_id], request.num_tokens)

    def commit_step(self) -> None:
        """The step has run: what it registered holds, and what was to be copied is."""
        self._registrations.commit()
        self._partial.commit()

    def withdraw(self, request: Request) -> None:
        """Free the request's blocks; those it registered in the present step were never filled and are forgotten."""
        self._registrations.withdraw(request.request_id)
        self.free(request)

    def withdraw_step(self) -> None:
        """The step has failed: forget what it registered, also for requests that hold no blocks any more.

        Those that do are to be freed. Whatever was to be copied for them is not taken for copied.
        """
        self._registrations.withdraw_all()

    def free(self, request: Request) -> None:
        """Give up the request's table, deepest block first. A request without one is fine.

        What steps that have run wrote into a block that is not full can be copied until the block is taken.
        """
        table = self.tables.get(request.request_id)
        if table is None:
            return
        if self.match_unit == "token":
            self._partial.keep(table)
        del self.tables[request.request_id]
        self._partial.withdraw(request.request_id)
        self._free(table, table.from_the_end())

    def keep_prompt(self, request: Request) -> tuple[int, ...]:
        """The prompt is computed: keep what the request asked for; of each of its `keep`, how many tokens are kept.

        Kept are the blocks that lookups find, whoever filled them: in groups with a window, those that hits at the ends
        of its `keep` need. What several of these cover is kept on the best terms of each.
        """
        if not (self.enable_caching and request.write_prefix_cache):
            return (0,) * len(request.keep)
        columns = self._prompt_columns(self.tables[request.request_id])
        for first, end, terms in spans_of_terms(request.keep, request.tenant, self.block_size):
            wanted = blocks_to_keep(columns, first, end, self.windows, self.block_size)
            if self.pool.keep(wanted, terms) < len(wanted):
                break
        return tuple(num_kept_tokens(columns, keep.num_tokens, self.windows, self.block_size) for keep in request.keep)

    def _prompt_columns(self, table: BlockTable) -> list[Column]:
        """Of each block of the prompt, what lookups find in each group, as far as they get."""
        request, size = table.request, self.block_size
        num_full, num_more = divmod(request.num_prompt_tokens, size)
        # The last one may have been filled by what was generated.
        hashes = request.block_hashes[: num_full + (num_more > 0)]
        path = self.pool.tree.walk(hashes, request.block_contents)
        path = path[: num_whole_blocks(path, self.windows)]
        columns: list[Column] = [[node.block(group) for group in range(len(self.windows))] for node in path]
        # If it is filled later, a prompt's tail in a window is not for lookups.
        stays = self.match_unit == "token" and (self.window_retention == "all" or not self._has_windows)
        if num_more and len(path) == num_full and stays and self._partial.parent_of(table, num_full) is not None:
            columns.append(table.at(num_full))
        return columns

    def release_expired(self) -> None:
        """Blocks that were kept for long enough are free as any other."""
        self.pool.release_expired()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, kept or not. What requests hold now stays theirs, and nobody finds it any more,
        nor what they compute behind it.
        """
        self.pool.reset()
        for table in self.tables.values():
            table.is_stale, table.is_registrable = True, False
