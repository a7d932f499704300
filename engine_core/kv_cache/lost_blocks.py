"""Which blocks were found by lookups until lately, and why they no longer are.

Remembered by hash, and hashes hold salts: nobody learns of another tenant's. Bounded by two generations: what the older
one holds is forgotten when the younger one is full. So noting a block is one entry in a dict and nothing more.
"""

from __future__ import annotations

import time
from typing import Literal, NamedTuple


class Loss(NamedTuple):
    """Since when (seconds, wall clock), and whether it gave way to other content or the cache was reset."""

    since_s: float
    why: Literal["evicted", "reset"]


class LostBlocks:
    """The last hashes that ceased to be in the cache: at most `capacity`, where not half as many go at a time.

    One that is cached again may still be here; who asks looks into the cache first.
    """

    def __init__(self, capacity: int) -> None:
        self._generation_size = max(1, capacity // 2)
        self._young: dict[bytes | None, Loss] = {}
        self._old: dict[bytes | None, Loss] = {}

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())

    def begin(self, num_hashes: int, why: Literal["evicted", "reset"]) -> tuple[dict[bytes | None, Loss], Loss]:
        """The dict to note the next hashes in, `num_hashes` at most, and what to note of each. None is no hash."""
        if len(self._young) + num_hashes > self._generation_size:
            self._old, self._young = self._young, {}
        return self._young, Loss(time.time(), why)

    def find(self, block_hash: bytes) -> Loss | None:
        """How the block was lost last; None if it never was, or nobody remembers."""
        return self._young.get(block_hash) or self._old.get(block_hash)
