"""The encoder cache against a slow, obvious model."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine_core.encoder_cache import CachedOutput, EncoderCache

CAPACITY_BYTES = 10
KEYS = st.integers(0, 7)


class EncoderCacheMachine(RuleBasedStateMachine):
    """The model: what is kept, in the order in which it was last unpinned, with its size and its pins; and what was
    forgotten while it was pinned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cache = EncoderCache(CAPACITY_BYTES)
        self.kept: list[list[int]] = []  # key, bytes, pins
        self.stale: list[list[int]] = []
        self.pinned: dict[int, CachedOutput] = {}  # by their entries' identity
        self.num_evicted = 0

    def entry(self, key: int) -> list[int] | None:
        return next((entry for entry in self.kept if entry[0] == key), None)

    @rule(key=KEYS, num_bytes=st.integers(1, CAPACITY_BYTES + 1))
    def put(self, key: int, num_bytes: int) -> None:
        if self.entry(key) is not None:
            return
        pinned_bytes = sum(entry[1] for entry in self.kept + self.stale if entry[2])
        assert self.cache.has_room(num_bytes) == (pinned_bytes + num_bytes <= CAPACITY_BYTES)
        if not self.cache.has_room(num_bytes):
            with pytest.raises(MemoryError):
                self.cache.put(key, ("output", key), num_bytes)
            return
        pinned = self.cache.put(key, ("output", key), num_bytes)
        while sum(entry[1] for entry in self.kept + self.stale) + num_bytes > CAPACITY_BYTES:
            self.kept.remove(next(entry for entry in self.kept if not entry[2]))
            self.num_evicted += 1
        self.kept.append([key, num_bytes, 1])
        self.pinned[id(self.kept[-1])] = pinned

    @rule(key=KEYS)
    def pin(self, key: int) -> None:
        entry = self.entry(key)
        if entry is None:
            with pytest.raises(KeyError):
                self.cache.pin(key)
            return
        pinned = self.pinned[id(entry)]
        assert self.cache.pin(key) is pinned and pinned.output == ("output", key)
        entry[2] += 1

    @precondition(lambda self: any(entry[2] for entry in self.kept + self.stale))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from([entry for entry in self.kept + self.stale if entry[2]]))
        self.cache.unpin(self.pinned[id(entry)])
        entry[2] -= 1
        if entry[2] > 0:
            return
        if any(entry is other for other in self.stale):
            self.stale = [other for other in self.stale if other is not entry]
        else:
            self.kept = [other for other in self.kept if other is not entry] + [entry]

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.stale += [entry for entry in self.kept if entry[2]]
        self.kept = []

    @invariant()
    def agrees(self) -> None:
        assert [key for key in range(8) if key in self.cache] == sorted(entry[0] for entry in self.kept)
        assert all(self.cache.is_pinned(key) == bool(pins) for key, _, pins in self.kept)
        assert len(self.cache) == len(self.kept) + len(self.stale)
        assert self.cache.used_bytes == sum(entry[1] for entry in self.kept + self.stale) <= CAPACITY_BYTES
        assert self.cache.pinned_bytes == sum(entry[1] for entry in self.kept + self.stale if entry[2])
        assert self.cache.num_evictions == self.num_evicted


TestEncoderCache = EncoderCacheMachine.TestCase
TestEncoderCache.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
