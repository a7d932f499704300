"""What the present step registered: blocks that lookups find already, and that its running is to fill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from .block import KVCacheBlock
from .block_pool import BlockPool
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


class StepRegistrations:
    """By request. Provisional until the step has run (`commit`); what it will not fill is withdrawn."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._by_request: dict[str, list[_Registration]] = {}

    def add(
        self, request_id: str, blocks: Sequence[Sequence[KVCacheBlock | None]], nodes: Sequence[PrefixNode]
    ) -> None:
        """`blocks`, in each group or None, were given `nodes`."""
        self._by_request.setdefault(request_id, []).append(_Registration(blocks, nodes))

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
