"""Full blocks that lookups find: which of a table's are registered, and which of them its present step is to fill.

What a step registers is provisional until it has run (`commit`); what it will not fill is withdrawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from engine_core.config import WindowRetention
from engine_core.request import Request

from .block import KVCacheBlock
from .block_pool import BlockPool
from .block_table import BlockTable
from .groups import first_visible_block
from .prefix_tree import PrefixNode


@dataclass(frozen=True, slots=True)
class _Registration:
    """Blocks, in each group or None, that were given `nodes`."""

    blocks: Sequence[Sequence[KVCacheBlock | None]]
    nodes: Sequence[PrefixNode]

    def blocks_still_held(self) -> list[KVCacheBlock]:
        """Some may have been taken for something else meanwhile."""
        return [
            block
            for blocks, node in zip(self.blocks, self.nodes)
            for block in blocks
            if block is not None and block.node is node
        ]


class Registrations:
    """Those of the present step, by request.

    `windows`, `retention`: as `KVCacheManager` has them.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, windows: Sequence[int | None], retention: WindowRetention
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._windows = windows
        self._retention = retention
        self._by_request: dict[str, list[_Registration]] = {}

    def register(self, table: BlockTable, num_tokens: int) -> None:
        """Let lookups find the blocks that the first `num_tokens` tokens of the table's request fill, while it is
        registrable.
        """
        request, first = table.request, len(table.nodes)
        # A token that a step computes before it is known, at most one, is in no hash yet.
        num_full = min(num_tokens, len(request.token_ids)) // self._block_size
        if first >= num_full or not table.is_registrable:
            return
        tree = self._pool.tree
        parent = self.live_node(table, first)
        if parent is None:
            return
        kept = self._kept_blocks(table, first, num_full)
        new_nodes: list[PrefixNode] = []
        for index, blocks in enumerate(kept, first):
            node = tree.add(parent, request.block_hashes[index], request.block_contents[index], blocks)
            if node is None:
                table.is_registrable = False
                break
            new_nodes.append(node)
            parent = node
        # Of what no group keeps, nothing stays.
        tree.prune(parent)
        table.nodes += new_nodes
        self._by_request.setdefault(request.request_id, []).append(_Registration(kept, new_nodes))

    def live_node(self, table: BlockTable, num_blocks: int) -> PrefixNode | None:
        """That of the first `num_blocks` blocks of `table`; made again if it was forgotten since.

        None if another prefix has taken its hash meanwhile: then nothing more of `table` is cached.
        """
        tree, nodes, request = self._pool.tree, table.nodes, table.request
        first = num_blocks
        while first > 0 and not nodes[first - 1].is_live:
            first -= 1
        parent = nodes[first - 1] if first else tree.root
        for index in range(first, num_blocks):
            node = tree.add(parent, request.block_hashes[index], request.block_contents[index], ())
            if node is None:
                tree.prune(parent)
                table.is_registrable = False
                return None
            parent = nodes[index] = node
        return parent

    def commit(self) -> None:
        """The step has run: what it registered is filled."""
        for registrations in self._by_request.values():
            self._pool.tree.fill(chain.from_iterable(held.blocks_still_held() for held in registrations))
        self._by_request.clear()

    def withdraw(self, request_id: str) -> None:
        """Forget what one request registered."""
        for registration in self._by_request.pop(request_id, ()):
            self._pool.unregister(registration.blocks_still_held())

    def withdraw_all(self) -> None:
        for request_id in list(self._by_request):
            self.withdraw(request_id)

    def _kept_blocks(self, table: BlockTable, first: int, end: int) -> list[tuple[KVCacheBlock | None, ...]]:
        """Blocks `[first, end)` of all groups, as far as lookups are to find them."""
        columns = []
        for group, window in enumerate(self._windows):
            blocks = table.blocks[group][first:end]
            if window is not None and self._retention == "prompt_tail":
                needed = range(*self._prompt_tail(table.request, window))
                blocks = [block if index in needed else None for index, block in enumerate(blocks, first)]
            columns.append(blocks)
        return list(zip(*columns, strict=True))

    def _prompt_tail(self, request: Request, window: int) -> tuple[int, int]:
        """The blocks that the longest hit of the same prompt needs in a group with this window."""
        end = (request.num_prompt_tokens - 1) // self._block_size
        return first_visible_block(window, end * self._block_size, self._block_size), end
