"""What a router keeps of an engine: which blocks it holds, made from its events alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVEvent

# Where a block can be: the medium, and the KV cache group.
Place = tuple[str | None, int | None]


@dataclass(slots=True)
class TableBlock:
    """A block's content, and how many copies of it there are in each place."""

    parent: BlockHash | None
    token_ids: tuple[int, ...]
    extra_keys: tuple[Any, ...] | None
    lora_name: str | None
    copies: dict[Place, int] = field(default_factory=dict)


class KVEventTable:
    """The blocks of one engine by hash, as of the last event applied.

    Our engines report a hash as stored when the first block of a group has it, and as removed when the last one is
    gone. Others report every block by itself, so copies are counted: a block is here as long as there is one.
    """

    def __init__(self) -> None:
        self.blocks: dict[BlockHash, TableBlock] = {}

    def apply(self, events: Iterable[KVEvent]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            elif isinstance(event, AllBlocksCleared):
                self.blocks.clear()

    def _store(self, event: BlockStored) -> None:
        parent, place = event.parent_block_hash, (event.medium, event.group_idx)
        for index, block_hash in enumerate(event.block_hashes):
            block = self.blocks.get(block_hash)
            if block is None:
                start = index * event.block_size
                keys = event.extra_keys[index] if event.extra_keys else None
                block = self.blocks[block_hash] = TableBlock(
                    parent, tuple(event.token_ids[start : start + event.block_size]), keys, event.lora_name
                )
            block.copies[place] = block.copies.get(place, 0) + 1
            parent = block_hash

    def _remove(self, event: BlockRemoved) -> None:
        place = (event.medium, event.group_idx)
        for block_hash in event.block_hashes:
            block = self.blocks.get(block_hash)
            if block is None or place not in block.copies:
                continue
            block.copies[place] -= 1
            if block.copies[place] == 0:
                del block.copies[place]
                if not block.copies:
                    del self.blocks[block_hash]
