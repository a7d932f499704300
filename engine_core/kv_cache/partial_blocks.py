"""Blocks that are not full: what their beginnings hold is found, and copied into the block of who found it.

Slots are copied only if a step that has run wrote them. What is copied from is referenced until the step has run that
the copy is for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine_core.request import Request
from engine_core.runner import SlotCopy

from .block import KVCacheBlock
from .block_content import content_between, num_common_tokens
from .block_pool import BlockPool
from .block_table import BlockTable
from .prefix_hit import Tail
from .prefix_tree import PrefixNode
from .registrations import Registrations


@dataclass(frozen=True, slots=True)
class _PendingCopies:
    """What is copied for a request that was admitted in this step; `sources` are referenced until it has run."""

    copies: Sequence[SlotCopy]
    sources: Sequence[KVCacheBlock]


class PartialBlocks:
    """Finds the beginnings of blocks, in `tables` and where requests have left them, and knows what is to be copied."""

    def __init__(
        self, pool: BlockPool, block_size: int, tables: Mapping[str, BlockTable], registrations: Registrations
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._tables = tables
        self._registrations = registrations
        self._pending: dict[str, _PendingCopies] = {}

    def find(self, request: Request, path: Sequence[PrefixNode], num_whole: int) -> Tail | None:
        """The longest beginning of the block behind the first `num_whole` of `path` that can be copied.

        O(log children + block size), and a glance at every running request for the block it is filling.
        """
        size = self._block_size
        start = num_whole * size
        end = min(start + size, request.num_tokens - 1)
        if end <= start:
            return None
        tree = self._pool.tree
        parent = path[num_whole - 1] if num_whole else tree.root
        content = content_between(request, start, end, size)
        node, num_slots = tree.longest_match(parent, content)
        filling: Tail | None = None
        for table in self._tables.values():
            index, num_filled = divmod(table.request.num_computed_tokens, size)
            if num_filled <= num_slots or self.parent_of(table, index) is not parent:
                continue
            theirs = content_between(table.request, index * size, index * size + num_filled, size)
            if (num_common := num_common_tokens(theirs, content)) > num_slots:
                num_slots, filling = num_common, Tail(table.at(index), num_common, theirs)
        if filling is not None or node is None:
            return filling
        blocks = [node.filled_block(group) for group in range(len(node.copies))]
        return Tail([block for block in blocks if block is not None], num_slots, node.content)

    def parent_of(self, table: BlockTable, index: int) -> PrefixNode | None:
        """The node before block `index`, the first one that is computed in part; None if nobody may copy from that."""
        is_own = table.num_shared_blocks <= index <= len(table.nodes)
        if not (is_own and table.is_registrable) or table.request.request_id in self._pending:
            return None
        return table.nodes[index - 1] if index else self._pool.tree.root

    def keep(self, table: BlockTable) -> None:
        """The request gives its table up: what was written into its last block can be copied until that is taken."""
        request, size = table.request, self._block_size
        index, num_filled = divmod(request.num_computed_tokens, size)
        if not num_filled or self.parent_of(table, index) is None:
            return
        blocks = table.at(index)
        if any(block.node is not None for block in blocks):
            return
        parent = self._registrations.live_node(table, index)
        if parent is not None:
            content = content_between(request, index * size, index * size + num_filled, size)
            self._pool.tree.add_partial(parent, content, blocks)

    def begin_copies(self, request: Request, tail: Tail, targets: Sequence[KVCacheBlock]) -> None:
        """`tail`, whose blocks are referenced already, is to be copied into `targets`, the request's own."""
        copies = [
            SlotCopy(source.block_id, target.block_id, tail.num_slots)
            for source, target in zip(tail.blocks, targets, strict=True)
        ]
        self._pending[request.request_id] = _PendingCopies(copies, tail.blocks)

    def copies_for(self, request: Request) -> Sequence[SlotCopy]:
        """What has to be copied before the step in which the request was just admitted."""
        pending = self._pending.get(request.request_id)
        return () if pending is None else pending.copies

    def commit(self) -> None:
        """The step has run: what was to be copied is."""
        for pending in self._pending.values():
            self._pool.free_blocks(pending.sources)
        self._pending.clear()

    def withdraw(self, request_id: str) -> None:
        """Nothing is to be copied for this request any more."""
        if (pending := self._pending.pop(request_id, None)) is not None:
            self._pool.free_blocks(pending.sources)
