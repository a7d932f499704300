"""Whose adapter gets a slot, where requests ask for more adapters than there are slots.

A running request holds its adapter's slot. One that waits is admitted if its adapter is in a slot or one is free (held
by nobody). Else it waits aside, and those behind it pass that need no slot, or one that is there. So that such a stream
cannot keep it waiting for ever, as many slots are *drained* as there are adapters waited for: a slot that is drained
admits nobody who is behind, in line, of anybody who waits for a slot. Drained are those with the fewest holders; of
equals, the one unused for longest.

When a slot is free, the adapter whose waiting request is the first in line has its turn: up to `max_per_turn` of those
that wait for it are *called* back to their places in line. They may join each other while others drain their slot
already, so that two adapters alternate in batches, not one request at a time. A free slot is kept for nobody: it goes
to who comes up first.

Why nobody waits for ever: holders run, so they end or give way, which a preempted one does like anybody who waits, from
its place at the front. A slot that is drained is joined only by those who were called, a fixed number, and by those
before whoever waits. So it becomes free, and of those that wait the first in line are called; which of those in line is
admitted is the policy's business, as ever. Nobody who waits holds anything, so there are no circles.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from engine_core.request import Request

from .adapter import Adapter
from .slots import AdapterSlots, Slot

_Place: TypeAlias = tuple[Any, ...]


@dataclass(slots=True)
class _Group:
    """Those that wait aside for the slot of one adapter, in their order in line; never empty."""

    line: list[tuple[_Place, Request]] = field(default_factory=list)
    places: dict[str, _Place] = field(default_factory=dict)

    @property
    def first(self) -> _Place:
        return self.line[0][0]

    def add(self, place: _Place, request: Request) -> None:
        insort(self.line, (place, request))
        self.places[request.request_id] = place

    def discard(self, request: Request) -> None:
        place = self.places.pop(request.request_id, None)
        if place is not None:
            del self.line[bisect_left(self.line, (place,))]


class SlotTurns:
    """Who waits for an adapter's slot, and whose turn it is. Only for requests with an adapter, but for `release` and
    `forget`.

    Costs O(adapters waited for) when a request comes up, and per step while somebody waits.

    Args:
        slots: of the runner.
        place_in_line: of a request that waits for admission, in line or aside: the lower goes first, none are equal.
        max_per_turn: how many of those that wait for one adapter are called at a time.

    Attributes:
        num_waits: how often a request began to wait, since start.
    """

    def __init__(self, slots: AdapterSlots, place_in_line: Callable[[Request], _Place], max_per_turn: int) -> None:
        self.slots = slots
        self.num_waits = 0
        self._place_in_line = place_in_line
        self._max_per_turn = max_per_turn
        self._groups: dict[bytes, _Group] = {}
        # Back in line, and not admitted yet.
        self._called: dict[bytes, set[str]] = {}
        self._draining: list[Slot] = []

    @property
    def is_anyone_waiting(self) -> bool:
        return bool(self._groups)

    def is_anyone_ready(self) -> bool:
        """Whether `take_ready` would return somebody now."""
        return bool(self._groups) and next(self._callable_groups(), None) is not None

    def may_join(self, request: Request) -> bool:
        """Whether the slots allow that a request which has come up is admitted now."""
        slot = self.slots.slot_of(_adapter(request).digest)
        if slot is None:
            return self.slots.num_held < self.slots.num_slots
        return slot not in self._draining or self._was_called(request) or self._is_before_others(request)

    def begin_wait(self, request: Request) -> None:
        """It waits aside until `take_ready` returns it. To be called while it has its place in line."""
        self.step_aside(request)
        self.num_waits += 1
        group = self._groups.setdefault(_adapter(request).digest, _Group())
        group.add(self._place_in_line(request), request)
        self._choose_draining()

    def step_aside(self, request: Request) -> None:
        """It waits for something that may take long: its turn is over."""
        digest = _adapter(request).digest
        called = self._called.get(digest)
        if called is not None:
            called.discard(request.request_id)
            if not called:
                del self._called[digest]

    def take_ready(self) -> list[Request]:
        """Those that are called. To be asked in every step, before anybody is admitted."""
        if not self._groups:
            return []
        ready: list[Request] = []
        for digest in list(self._callable_groups()):
            group = self._groups[digest]
            for _, request in group.line[: self._num_to_call(digest)]:
                group.discard(request)
                self._called.setdefault(digest, set()).add(request.request_id)
                ready.append(request)
            if not group.line:
                del self._groups[digest]
        self._choose_draining()
        return ready

    def take(self, request: Request) -> int:
        """It is admitted, as it may be: it holds a slot, which this returns, with its adapter in it.

        Raises whatever `Runner.place_adapter` raises; then it holds nothing, and its turn is over.
        """
        self.step_aside(request)
        try:
            return self.slots.take(request.request_id, _adapter(request)).index
        finally:
            self._choose_draining()

    def slot_of(self, request: Request) -> int | None:
        """The slot of a request that runs; None without an adapter."""
        if request.adapter is None:
            return None
        slot = self.slots.slot_of(request.adapter.digest)
        assert slot is not None and request.request_id in slot.holders, request
        return slot.index

    def release(self, request: Request) -> None:
        """It runs no longer."""
        if request.adapter is None:
            return
        slot = self.slots.release(request.request_id, request.adapter)
        if slot is not None and not slot.holders:
            self._choose_draining()

    def forget(self, request: Request) -> None:
        """It is over, in whatever state it was."""
        if request.adapter is None:
            return
        self.release(request)
        self.step_aside(request)
        digest = request.adapter.digest
        group = self._groups.get(digest)
        if group is not None:
            group.discard(request)
            if not group.line:
                del self._groups[digest]
            self._choose_draining()

    def is_idle(self) -> bool:
        """Whether nothing is kept for any request."""
        return not (self._groups or self._called or self._draining or self.slots.num_held)

    def _was_called(self, request: Request) -> bool:
        return request.request_id in self._called.get(_adapter(request).digest, ())

    def _is_before_others(self, request: Request) -> bool:
        place, own = self._place_in_line(request), _adapter(request).digest
        return all(place < group.first for digest, group in self._groups.items() if digest != own)

    def _num_to_call(self, digest: bytes) -> int:
        return self._max_per_turn - len(self._called.get(digest, ()))

    def _num_unclaimed(self) -> int:
        """Free slots beyond those that the adapters called into them will take."""
        num_claims = sum((slot := self.slots.slot_of(digest)) is None or not slot.holders for digest in self._called)
        return max(0, self.slots.num_slots - self.slots.num_held - num_claims)

    def _callable_groups(self) -> Iterator[bytes]:
        num_unclaimed = self._num_unclaimed()
        someone_is_before = False
        for digest, _ in sorted(self._groups.items(), key=lambda item: item[1].first):
            slot = self.slots.slot_of(digest)
            if self._num_to_call(digest) <= 0:
                is_callable = False
            elif slot is not None and slot.holders:
                is_callable = slot not in self._draining or not someone_is_before
            elif is_callable := num_unclaimed > 0:
                num_unclaimed -= 1
            if is_callable:
                yield digest
            else:
                someone_is_before = True

    def _choose_draining(self) -> None:
        """Drain a slot for each adapter that is waited for, is in none, and will not get one that is free.

        To be called after every change.
        """
        if not self._groups:
            self._draining.clear()
            return
        self._draining = [slot for slot in self._draining if slot.holders]
        num_waited_for = sum(
            self.slots.slot_of(digest) is None and digest not in self._called for digest in self._groups
        )
        num_needed = max(0, num_waited_for - self._num_unclaimed())
        del self._draining[num_needed:]
        while len(self._draining) < num_needed:
            candidates = [slot for slot in self.slots.held() if slot not in self._draining]
            if not candidates:
                return
            self._draining.append(min(candidates, key=lambda slot: (len(slot.holders), slot.last_used)))


def _adapter(request: Request) -> Adapter:
    assert request.adapter is not None
    return request.adapter
