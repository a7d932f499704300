"""What the encoder made of pictures, kept for whoever has the same picture next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from .config import EngineConfig

_DEFAULT_ROWS = 16_384


@dataclass(eq=False, slots=True)
class CachedOutput:
    """What the encoder made of `key`."""

    key: Hashable
    output: Any
    num_bytes: int
    num_pins: int = 0


class EncoderCache:
    """Outputs by key, at most `capacity_bytes` of them. What is pinned stays; of the rest, what was unpinned first goes
    first. `len` counts everything that takes room.

    Attributes:
        used_bytes, pinned_bytes: of everything kept, and of what cannot be evicted now.
        num_evictions: since start.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.pinned_bytes = 0
        self.num_evictions = 0
        self._entries: dict[Hashable, CachedOutput] = {}
        self._unpinned: OrderedDict[Hashable, CachedOutput] = OrderedDict()
        # Forgotten, but pinned still.
        self._num_stale = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries) + self._num_stale

    def is_pinned(self, key: Hashable) -> bool:
        return key in self._entries and key not in self._unpinned

    def pin(self, key: Hashable) -> CachedOutput:
        """Keep what is cached under `key` until it is unpinned as often as it was pinned.

        Raises:
            KeyError: it is not cached.
        """
        entry = self._entries[key]
        if entry.num_pins == 0:
            del self._unpinned[key]
            self.pinned_bytes += entry.num_bytes
        entry.num_pins += 1
        return entry

    def unpin(self, entry: CachedOutput) -> None:
        """It may be forgotten already; then it is gone with its last pin."""
        assert entry.num_pins > 0, entry.key
        entry.num_pins -= 1
        if entry.num_pins > 0:
            return
        self.pinned_bytes -= entry.num_bytes
        if self._entries.get(entry.key) is entry:
            self._unpinned[entry.key] = entry
        else:
            self.used_bytes -= entry.num_bytes
            self._num_stale -= 1

    def clear(self) -> None:
        """Forget everything. What is pinned stays with those who have it, and nobody else finds it."""
        self.used_bytes -= sum(entry.num_bytes for entry in self._unpinned.values())
        self._num_stale += len(self._entries) - len(self._unpinned)
        self._unpinned.clear()
        self._entries.clear()

    def has_room(self, num_bytes: int) -> bool:
        """Whether that much can be kept besides what is pinned."""
        return self.pinned_bytes + num_bytes <= self.capacity_bytes

    def put(self, key: Hashable, output: Any, num_bytes: int) -> CachedOutput:
        """Keep `output`, pinned once, under a key that is not cached, evicting what must go.

        Raises:
            MemoryError: what is pinned leaves no room; nothing has changed.
        """
        assert key not in self._entries, key
        if not self.has_room(num_bytes):
            raise MemoryError(
                f"{num_bytes} bytes beside {self.pinned_bytes} pinned ones, the encoder cache has {self.capacity_bytes}"
            )
        while self.used_bytes + num_bytes > self.capacity_bytes:
            evicted, entry = self._unpinned.popitem(last=False)
            del self._entries[evicted]
            self.used_bytes -= entry.num_bytes
            self.num_evictions += 1
        self._entries[key] = entry = CachedOutput(key, output, num_bytes, num_pins=1)
        self.used_bytes += num_bytes
        self.pinned_bytes += num_bytes
        return entry


def encoder_cache_bytes(config: EngineConfig, embed_bytes: int) -> int:
    """What an engine's encoder cache may take: as configured, or room for a good many rows and any step's."""
    if config.encoder_cache_bytes is not None:
        return config.encoder_cache_bytes
    return embed_bytes * max(config.max_num_batched_tokens, _DEFAULT_ROWS)
