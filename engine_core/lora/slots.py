"""Which LoRA adapter is in which slot of the runner, and which requests hold it there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .adapter import Adapter


@dataclass(slots=True, eq=False)
class Slot:
    """`digest` is whose weights are in it, None if nobody's; `holders` are the running requests that compute with them.
    `last_used` tells slots apart by when they were last taken or released.
    """

    index: int
    digest: bytes | None = None
    holders: set[str] = field(default_factory=set)
    last_used: int = 0


class AdapterSlots:
    """A runner's slots. One that nobody holds keeps its weights as long as they are loaded under some name and no
    other adapter needs it; the longest unused goes first.

    Args:
        place, clear: `Runner.place_adapter` and `Runner.clear_adapter`.
        is_loaded: whether an adapter of this digest has a name.

    Attributes:
        num_placements: since start.
    """

    def __init__(
        self,
        num_slots: int,
        place: Callable[[int, Adapter], None],
        clear: Callable[[int], None],
        is_loaded: Callable[[bytes], bool],
    ) -> None:
        self.num_placements = 0
        self._place = place
        self._clear = clear
        self._is_loaded = is_loaded
        self._slots = [Slot(index) for index in range(num_slots)]
        self._by_digest: dict[bytes, Slot] = {}
        self._uses = itertools.count(1)

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def slot_of(self, digest: bytes) -> Slot | None:
        """Where an adapter is, held or not."""
        return self._by_digest.get(digest)

    @property
    def num_held(self) -> int:
        return sum(bool(slot.holders) for slot in self._slots)

    def held(self) -> Iterable[Slot]:
        return (slot for slot in self._slots if slot.holders)

    def take(self, holder: str, adapter: Adapter) -> Slot:
        """Let `holder` hold the slot of `adapter`, which is placed in a free one if it is in none. There must be one.

        Raises whatever `place` raises: then nothing is held, and nobody's weights are in that slot.
        """
        slot = self._by_digest.get(adapter.digest)
        if slot is None:
            slot = min((slot for slot in self._slots if not slot.holders), key=lambda slot: slot.last_used)
            self._empty(slot)
            self._place(slot.index, adapter)
            self.num_placements += 1
            slot.digest = adapter.digest
            self._by_digest[adapter.digest] = slot
        slot.holders.add(holder)
        slot.last_used = next(self._uses)
        return slot

    def has_unloaded(self) -> bool:
        """Whether `clear_unloaded` would do something."""
        return any(self._is_left_over(slot) for slot in self._slots)

    def clear_unloaded(self) -> None:
        """Let go of what nobody holds and nobody can ask for."""
        for slot in self._slots:
            if self._is_left_over(slot):
                self._empty(slot)
                self._clear(slot.index)

    def _is_left_over(self, slot: Slot) -> bool:
        return slot.digest is not None and not slot.holders and not self._is_loaded(slot.digest)

    def _empty(self, slot: Slot) -> None:
        if slot.digest is not None:
            del self._by_digest[slot.digest]
            slot.digest, slot.last_used = None, 0

    def release(self, holder: str, adapter: Adapter) -> Slot | None:
        """The slot that `holder` does not hold any more; None if it held none."""
        slot = self._by_digest.get(adapter.digest)
        if slot is None or holder not in slot.holders:
            return None
        slot.holders.remove(holder)
        slot.last_used = next(self._uses)
        return slot


def no_slots() -> AdapterSlots:
    """Of a runner without adapters."""
    return AdapterSlots(0, lambda slot, adapter: None, lambda slot: None, lambda digest: False)
