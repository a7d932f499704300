"""A cache that is bounded by what its values weigh."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

# What an entry costs besides its value: key, bookkeeping. Counted, so that small values cannot pile up unseen.
ENTRY_BYTES = 256


class ByteLRU(Generic[K, V]):
    """At most `max_bytes` of entries; the least recently used make room. For one thread.

    An entry weighs what its sender says, and `ENTRY_BYTES`. One that is too large alone is not kept and evicts nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """The value, now the most recently used; None if there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: K, value: V, num_bytes: int) -> None:
        """Keep `value`, in place of what `key` had before."""
        self.pop(key)
        weight = num_bytes + ENTRY_BYTES
        if weight > self.max_bytes:
            return
        self._entries[key] = value, weight
        self.num_bytes += weight
        while self.num_bytes > self.max_bytes:
            _, (_, evicted) = self._entries.popitem(last=False)
            self.num_bytes -= evicted

    def pop(self, key: K) -> V | None:
        """Forget the key; what it had, or None."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        value, weight = entry
        self.num_bytes -= weight
        return value

    def clear(self) -> None:
        self._entries.clear()
        self.num_bytes = 0
