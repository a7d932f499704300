"""Who was refused for want of blocks, and whether it would be again: told without another lookup.

A request lacks what it needs in all, plus what is in use and no part of its hit, less the pool. To take, touch or evict
blocks never lessens that: only to free enough of them does, or a longer hit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine_core.request import Request

from .block_pool import BlockPool
from .prefix_hit import PrefixHit


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The whole sequence of `request` lacked `num_blocks` blocks beyond `num_spare_blocks` and, with `spares_kept`,
    kept ones; besides those that were to be copied from.

    `num_freed` and `num_registered` are the pool's at that moment, `next_hash` that of the first block it did not find
    cached (None if it cannot find more).
    """

    request: Request
    num_blocks: int
    num_spare_blocks: int
    spares_kept: bool
    num_freed: int
    num_registered: int
    next_hash: bytes | None


class Shortage:
    """The last refusal, until somebody is admitted. Every operation is O(1)."""

    def __init__(self, pool: BlockPool, windows: Sequence[int | None]) -> None:
        self._pool = pool
        self._has_windows = tuple(windows) != (None,)
        self._last: _Refusal | None = None

    def note(
        self, request: Request, num_blocks: int, num_spare_blocks: int, hit: PrefixHit, *, spares_kept: bool
    ) -> None:
        """`request`, which found `hit`, was refused: with what had to be spared, it lacked `num_blocks`."""
        next_hash = None
        if not self._has_windows and request.read_prefix_cache and hit.num_whole_blocks < len(request.block_hashes):
            next_hash = request.block_hashes[hit.num_whole_blocks]
        num_freed, num_registered = self._pool.num_freed, self._pool.tree.num_registered
        refusal = _Refusal(request, num_blocks, num_spare_blocks, spares_kept, num_freed, num_registered, next_hash)
        before = self._last
        if before is not None and replace(before, num_blocks=num_blocks) == refusal:
            # With a tail or without it, a hit needs other blocks of windows.
            refusal = min(before, refusal, key=lambda refusal: refusal.num_blocks)
        self._last = refusal

    def end(self) -> None:
        """Somebody is admitted."""
        self._last = None

    def lasts(self, request: Request, num_spare_blocks: int, *, spares_kept: bool) -> bool:
        """Whether `request`, refused before with as much to spare, would be again. False says nothing."""
        last = self._last
        return (
            last is not None
            and last.request is request
            and last.num_spare_blocks == num_spare_blocks
            and last.spares_kept == spares_kept
            and self._pool.num_freed - last.num_freed < last.num_blocks
            and not self._may_hit_more(last)
        )

    def _may_hit_more(self, last: _Refusal) -> bool:
        if self._has_windows:
            # Any block that comes back may be the one that its window lacked.
            return self._pool.tree.num_registered != last.num_registered
        return last.next_hash is not None and self._pool.tree.holds(last.next_hash)
