"""Block tables of all requests: prefix hits, slot allocation, registration of full blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine_core.config import FreeOrder, FullPromptHit
from engine_core.request import Request

from .block import KVCacheBlock
from .block_pool import BlockPool
from .residency import BlockResidency, ObservedBlockPool


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The longest cached prefix of a request: `num_tokens` tokens need not be computed.

    `num_tokens` is a multiple of the block size, except when every block of the sequence is cached: then it
    is one less, because the last token's logits are needed. `tail` holds what follows the whole blocks, to be
    copied; only a fork has one.
    """

    blocks: Sequence[KVCacheBlock]
    num_tokens: int
    tail: KVCacheBlock | None = None


NO_HIT = PrefixHit((), 0)


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why a request could not be admitted: its whole sequence lacked `num_blocks` blocks beyond `num_spare_blocks`.

    `num_freed` is `BlockPool.num_freed` at that moment, `next_hash` that of the first block it did not find cached
    (None if it cannot find more).
    """

    request: Request
    num_blocks: int
    num_spare_blocks: int
    num_freed: int
    next_hash: bytes | None


class BlockTable:
    """The blocks of one request, in sequence order; append-only until freed.

    The first `num_shared_blocks` came from the cache and are never written. The first `num_registered_blocks`
    can be found by lookups (or are shared).
    """

    __slots__ = ("block_ids", "blocks", "num_registered_blocks", "num_shared_blocks")

    def __init__(self, shared: Sequence[KVCacheBlock]) -> None:
        self.blocks = list(shared)
        self.block_ids = [block.block_id for block in shared]
        self.num_shared_blocks = self.num_registered_blocks = len(shared)

    @property
    def block_tables(self) -> Sequence[Sequence[int]]:
        return (self.block_ids,)


class KVCacheManager:
    """Gives requests their slots and remembers which blocks hold which prefix.

    A block is registered when the step that fills it is *scheduled*, so that another request of the same step can
    share it, or as soon as its tokens are known if that is later; until `commit_step` that is provisional, and
    `withdraw`, for all requests `withdraw_step`, undoes it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_caching: bool = True,
        full_prompt_hit: FullPromptHit = "recompute_last_token",
        free_order: FreeOrder = "append_all",
        residency: BlockResidency | None = None,
    ) -> None:
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.full_prompt_hit: FullPromptHit = full_prompt_hit
        if residency is None:
            self.pool = BlockPool(num_blocks, free_order)
        else:
            self.pool = ObservedBlockPool(num_blocks, free_order, residency)
        self.tables: dict[str, BlockTable] = {}
        self._provisional: dict[str, list[KVCacheBlock]] = {}
        self._shortage: Shortage | None = None

    def get_computed_blocks(self, request: Request) -> PrefixHit:
        """The longest run of cached blocks from the start of the sequence. Changes nothing."""
        if not self.enable_caching or not request.read_prefix_cache:
            return NO_HIT
        num_tokens = request.num_tokens
        hashes = request.block_hashes
        if self.full_prompt_hit == "drop_last_block" and len(hashes) * self.block_size == num_tokens:
            hashes = hashes[:-1]
        blocks = self.pool.get_cached_run(hashes)
        return PrefixHit(blocks, min(len(blocks) * self.block_size, num_tokens - 1))

    def get_forked_blocks(self, request: Request, parent: Request) -> PrefixHit:
        """All but the last token of a prompt that `parent`, which holds blocks, has computed whole. Changes nothing."""
        num_hit_tokens = request.num_prompt_tokens - 1
        num_full = request.num_prompt_tokens // self.block_size
        blocks = self.tables[parent.request_id].blocks
        has_tail = num_hit_tokens > num_full * self.block_size
        return PrefixHit(blocks[:num_full], num_hit_tokens, blocks[num_full] if has_tail else None)

    def still_lacks_room(self, request: Request, num_spare_blocks: int = 0) -> bool:
        """Whether `allocate_slots` with `reserve_full_sequence`, refused to this request before, would be again.

        O(1), without a lookup; False says nothing. A request lacks what it needs in all, plus what is in use and no
        part of its hit, less the pool. To take, touch or evict blocks never lessens that: only to free enough of them
        does, or a longer hit.
        """
        shortage = self._shortage
        return (
            shortage is not None
            and shortage.request is request
            and shortage.num_spare_blocks == num_spare_blocks
            and shortage.next_hash not in self.pool.cached
            and self.pool.num_freed - shortage.num_freed < shortage.num_blocks
        )

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        hit: PrefixHit = NO_HIT,
        *,
        reserve_full_sequence: bool = False,
        num_spare_blocks: int = 0,
    ) -> list[KVCacheBlock] | None:
        """Make room for `num_new_tokens` more tokens after those computed, and register the blocks they fill.

        `hit` is given when the request has no table yet: its blocks become the head of the table. Returns the newly
        taken blocks, or None, with nothing changed, if they would leave fewer than `num_spare_blocks` free
        or, with `reserve_full_sequence`, if the rest of the sequence would not fit either.
        """
        table = self.tables.get(request.request_id)
        num_held = len(hit.blocks) if table is None else len(table.blocks)
        num_tokens = num_new_tokens + (hit.num_tokens if table is None else request.num_computed_tokens)
        num_needed = -(-num_tokens // self.block_size) - num_held
        num_required = num_spare_blocks + num_needed
        if reserve_full_sequence:
            num_required = num_spare_blocks + -(-request.num_tokens // self.block_size) - num_held
        num_required += len([block for block in hit.blocks if block.ref_cnt == 0])
        num_lacking = num_required - self.pool.num_free_blocks
        if num_lacking > 0:
            if reserve_full_sequence:
                self._shortage = Shortage(
                    request, num_lacking, num_spare_blocks, self.pool.num_freed, self._first_missing_hash(request, hit)
                )
            return None
        if table is None:
            self._shortage = None
            self.pool.touch(hit.blocks)
            table = self.tables[request.request_id] = BlockTable(hit.blocks)
        new_blocks: list[KVCacheBlock] = []
        if num_needed > 0:
            new_blocks = self.pool.get_new_blocks(num_needed)
            table.blocks += new_blocks
            table.block_ids += [block.block_id for block in new_blocks]
        self._register_full_blocks(request, table, num_tokens)
        return new_blocks

    def _first_missing_hash(self, request: Request, hit: PrefixHit) -> bytes | None:
        if not request.read_prefix_cache or len(hit.blocks) >= len(request.block_hashes):
            return None
        return request.block_hashes[len(hit.blocks)]

    def register_known(self, request: Request) -> None:
        """Steps that have run or are running compute all tokens of the request: register the blocks they fill."""
        self._register_full_blocks(request, self.tables[request.request_id], request.num_tokens)

    def _register_full_blocks(self, request: Request, table: BlockTable, num_tokens: int) -> None:
        first = table.num_registered_blocks
        # A token that a step computes before it is known, at most one, is in no hash yet.
        num_full = min(num_tokens, request.num_tokens) // self.block_size
        if first >= num_full or not self.enable_caching:
            return
        blocks = table.blocks[first:num_full]
        self.pool.register(blocks, request.block_hashes[first:num_full])
        table.num_registered_blocks = num_full
        self._provisional.setdefault(request.request_id, []).extend(blocks)

    def commit_step(self) -> None:
        """The step has run: what it registered holds."""
        self._provisional.clear()

    def withdraw(self, request: Request) -> None:
        """Free the request's blocks; those it registered in the present step were never filled and are forgotten."""
        self.pool.unregister(self._provisional.pop(request.request_id, ()))
        self.free(request)

    def withdraw_step(self) -> None:
        """The step has failed: forget what it registered, also for requests that hold no blocks any more."""
        for blocks in self._provisional.values():
            self.pool.unregister(blocks)
        self._provisional.clear()

    def free(self, request: Request) -> None:
        """Give up the request's table, deepest block first. A request without one is fine."""
        table = self.tables.pop(request.request_id, None)
        if table is not None:
            self.pool.free_blocks(reversed(table.blocks))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and no change, while any request holds a block."""
        return self.pool.reset()
