"""Which requests of a step begin with the same cache blocks, and whether reading these once for all of them pays.

Block tables that begin alike are a trie: all that share the first block, then, where they part, those that share the
next, and so on. At each fork there is a choice: one group of all with what they share until here, or the groups behind
the fork, each with more. The better one is taken, by bytes that need not be read:

    gain = (Σ tiles of each alone · keys it sees of the prefix − tiles together · keys seen) · bytes of a key and value
           − tokens · bytes of the partial results they leave behind, written and read again

A request with many queries of its own gains nothing: it reads a key once per tile anyway. With a window, a table says
nothing of blocks that its request sees no more (`AttentionMetadata.block_tables`): only those share whose windows begin
in the same block, and what they share begins there. (Chunk- and prefix-aware
kernels: Ye et al., "ChunkAttention", 2024; Juravsky et al., "Hydragen", 2024; FlashInfer's cascade inference.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

# How many forks are looked behind.
_MAX_FORKS = 16


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The first `num_tokens` tokens, whole blocks, of `requests` (ascending places in the batch) lie in the same slots,
    as far as any token of this step sees them. They come before all of these.
    """

    requests: np.ndarray
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ReadingCosts:
    """What the gain is reckoned with.

    Args:
        kv_bytes: of one token's keys and values, all heads together.
        part_bytes: of the partial results of one query, written and read again.
        tile_queries: how many tokens of different requests share a tile.
        overhead_bytes: what could be read in the time the additional launches take.
    """

    kv_bytes: int
    part_bytes: int
    tile_queries: int
    overhead_bytes: int


def shared_prefixes(
    block_tables: np.ndarray,
    seq_lens: np.ndarray,
    query_lens: np.ndarray,
    block_size: int,
    *,
    costs: ReadingCosts,
    num_tiles: np.ndarray,
    sliding_window: int | None = None,
) -> list[SharedPrefix]:
    """The prefixes that pay, no request in two of them; none where together they do not.

    The first four are those of `AttentionMetadata`; entries of a table that hold no whole block of tokens before this
    step's, or none that is seen, are not looked at. `num_tiles` `[num_requests]`: how many tiles read a request's keys
    when it is alone. The cost is that of comparing the entries that are shared, once.
    """
    search = _Search(block_tables, seq_lens - query_lens, query_lens, block_size, costs, num_tiles, sliding_window)
    found = [
        search.best(members, column + 1, _MAX_FORKS)
        for column, beginning in search.beginnings()
        for members in search.parted(beginning, column)
    ]
    if sum(gain for gain, _ in found) <= costs.overhead_bytes:
        return []
    return [prefix for _, prefixes in found for prefix in prefixes]


def are_shared(prefixes: Sequence[SharedPrefix], block_tables: np.ndarray, block_size: int) -> bool:
    """Whether the same requests of the same step share these prefixes by other block tables, too."""
    for prefix in prefixes:
        blocks = block_tables[prefix.requests, : prefix.num_tokens // block_size]
        if (blocks != blocks[0]).any():
            return False
    return True


@dataclass(frozen=True, slots=True)
class _Search:
    block_tables: np.ndarray
    num_cached: np.ndarray
    query_lens: np.ndarray
    block_size: int
    costs: ReadingCosts
    num_tiles: np.ndarray
    sliding_window: int | None

    def beginnings(self) -> Iterator[tuple[int, np.ndarray]]:
        """Columns in which requests begin to see something, and who does; nobody who is alone."""
        if self.sliding_window is None:
            yield 0, np.arange(len(self.num_cached))
            return
        first = np.maximum(0, self.num_cached + 1 - self.sliding_window) // self.block_size
        columns, counts = np.unique(first, return_counts=True)
        for column in columns[counts > 1].tolist():
            yield column, np.flatnonzero(first == column)

    def parted(self, members: np.ndarray, column: int) -> Iterator[np.ndarray]:
        """Those of `members` that have a block in this column, by which one; nobody who is alone."""
        members = members[self.num_cached[members] // self.block_size > column]
        if len(members) < 2:
            return
        blocks = self.block_tables[members, column]
        order = np.argsort(blocks, kind="stable")
        borders = np.flatnonzero(np.diff(blocks[order])) + 1
        yield from (members[part] for part in np.split(order, borders) if len(part) > 1)

    def best(self, members: np.ndarray, num_alike: int, num_forks: int) -> tuple[int, list[SharedPrefix]]:
        """The gain and the prefixes of `members`, whose first `num_alike` blocks are the same."""
        num_blocks = self.num_shared(members, num_alike)
        gain, prefixes = max(0, self.gain(members, num_blocks * self.block_size)), []
        if gain:
            prefixes = [SharedPrefix(members, num_blocks * self.block_size)]
        if num_forks:
            behind = [self.best(part, num_blocks + 1, num_forks - 1) for part in self.parted(members, num_blocks)]
            if sum(gain for gain, _ in behind) > gain:
                return sum(gain for gain, _ in behind), [prefix for _, found in behind for prefix in found]
        return gain, prefixes

    def num_shared(self, members: np.ndarray, num_alike: int) -> int:
        """How many blocks `members` have in common at the beginning of their tables."""
        limit = int(self.num_cached[members].min()) // self.block_size
        width = 32
        while num_alike < limit:
            part = self.block_tables[members, num_alike : min(limit, num_alike + width)]
            is_same = (part == part[0]).all(axis=0)
            if not is_same.all():
                return num_alike + int(is_same.argmin())
            num_alike += len(is_same)
            width *= 2
        return num_alike

    def gain(self, members: np.ndarray, num_tokens: int) -> int:
        """Bytes that need not be read."""
        num_seen = np.full(len(members), num_tokens)
        if self.sliding_window is not None:
            num_seen -= np.clip(self.num_cached[members] + 1 - self.sliding_window, 0, num_tokens)
        num_queries = int(self.query_lens[members].sum())
        alone = int((self.num_tiles[members] * num_seen).sum())
        together = -(-num_queries // self.costs.tile_queries) * int(num_seen.max())
        return (alone - together) * self.costs.kv_bytes - num_queries * self.costs.part_bytes
