"""What pictures are encoded from: which inputs are here or were asked for, and which requests wait for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from ipc.vocabulary import MultimodalFeature, WantedFeature

from .request import Request

Inputs: TypeAlias = Mapping[str, np.ndarray]

# Those asked are made one after the other. More of them, and a long queue's last ones would come late, however busily
# their frontend works: what is overdue is to mean that nobody works on it.
MAX_ASKED = 64


@dataclass(slots=True)
class _Entry:
    """Inputs of one key: held, or asked for of one of the requests that want them. Someone always does."""

    num_bytes: int
    asked_of: Request
    inputs: Inputs | None = None
    wanted_by: dict[str, tuple[Request, MultimodalFeature]] = field(default_factory=dict)


class FeatureInputs:
    """Inputs by key, as long as a request wants them; `num_bytes` of them, asked or held, count as declared.

    What several requests want is asked of one of them, and of another one if that leaves without having answered. A
    request gets all it wants or nothing, so none holds what another one waits for while it waits itself. More than
    `max_bytes` are only asked for when nothing else is asked or held, more than `MAX_ASKED` when nothing else is asked.
    """

    def __init__(self, max_bytes: int, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_bytes = 0
        self.timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._clock = clock
        self._entries: dict[bytes, _Entry] = {}
        self._wants: dict[str, set[bytes]] = {}
        self._asked_s: dict[bytes, float] = {}  # of those not held, the longest asked first
        self._unpublished: list[tuple[Request, bytes]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def unknown(self, features: Iterable[MultimodalFeature]) -> dict[bytes, int]:
        """Of these features' inputs, those neither here nor asked for: what they weigh, by key."""
        return {f.key: f.num_input_bytes for f in features if f.key not in self._entries}

    def may_ask(self, unknown: Mapping[bytes, int]) -> bool:
        """Whether there is room to ask for these now."""
        has_room = not self._entries or self.num_bytes + sum(unknown.values()) <= self._max_bytes
        return has_room and (not self._asked_s or len(self._asked_s) + len(unknown) <= MAX_ASKED)

    def want(self, request: Request, features: Iterable[MultimodalFeature]) -> None:
        """See that the inputs of these features of `request` come, besides those that it wants already."""
        for feature in features:
            entry = self._entries.get(feature.key)
            if entry is None:
                entry = self._entries[feature.key] = _Entry(feature.num_input_bytes, request)
                self.num_bytes += entry.num_bytes
                self._ask(feature.key, entry)
            entry.wanted_by.setdefault(request.request_id, (request, feature))
            self._wants.setdefault(request.request_id, set()).add(feature.key)

    def keys_for(self, request: Request) -> set[bytes]:
        return self._wants.get(request.request_id, set())

    def has_all(self, request: Request) -> bool:
        """Whether everything that `request` wants is here."""
        return all(self._entries[key].inputs is not None for key in self.keys_for(request))

    def get(self, request: Request, key: bytes) -> Inputs | None:
        """The inputs, if they are here and `request` wants them."""
        return self._entries[key].inputs if key in self.keys_for(request) else None

    def release(self, request: Request, key: bytes) -> None:
        """`request` no longer wants these; fine if it never did."""
        if key not in self.keys_for(request):
            return
        wants = self._wants[request.request_id]
        wants.remove(key)
        if not wants:
            del self._wants[request.request_id]
        entry = self._entries[key]
        del entry.wanted_by[request.request_id]
        if not entry.wanted_by:
            del self._entries[key]
            self._asked_s.pop(key, None)
            self.num_bytes -= entry.num_bytes
        elif entry.inputs is None and entry.asked_of is request:
            self._ask_another(key, entry)

    def release_all(self, request: Request) -> None:
        for key in tuple(self.keys_for(request)):
            self.release(request, key)

    def reject(self, request: Request, key: bytes) -> None:
        """What came for `request` is no good: give it to nobody else either, who want it from elsewhere."""
        if key not in self.keys_for(request):
            return
        entry = self._entries[key]
        self.release(request, key)
        if entry.wanted_by and entry.inputs is not None:
            entry.inputs = None
            self._ask_another(key, entry)

    def asked(self, output_id: str, key: bytes) -> tuple[Request, MultimodalFeature] | None:
        """Of whom these were asked, if it was this caller's request and they have not come."""
        entry = self._entries.get(key)
        if entry is None or entry.inputs is not None or entry.asked_of.output_id != output_id:
            return None
        return entry.wanted_by[entry.asked_of.request_id]

    def supply(self, key: bytes, inputs: Inputs) -> list[Request]:
        """Here are inputs that were asked for. Returns who wanted them."""
        entry = self._entries[key]
        del self._asked_s[key]
        entry.inputs = inputs
        return [request for request, _ in entry.wanted_by.values()]

    def overdue(self) -> list[tuple[Request, MultimodalFeature]]:
        """Of whom was asked what has not come for `timeout_s`."""
        if not self.is_any_overdue():
            return []
        latest_s = self._clock() - self.timeout_s
        late = [self._entries[key] for key, asked_s in self._asked_s.items() if asked_s <= latest_s]
        return [entry.wanted_by[entry.asked_of.request_id] for entry in late]

    def is_any_overdue(self) -> bool:
        return bool(self._asked_s) and next(iter(self._asked_s.values())) <= self._clock() - self.timeout_s

    def take_wanted(self) -> list[WantedFeature]:
        """What was asked for since the last call and is still to come."""
        asked, self._unpublished = self._unpublished, []
        wanted: dict[WantedFeature, None] = {}
        for request, key in asked:
            entry = self._entries.get(key)
            if entry is not None and entry.inputs is None and entry.asked_of is request:
                # The step in which it was asked may have taken longer than its answer may.
                self._begin_to_wait(key)
                wanted[WantedFeature(request.output_id, key)] = None
        return list(wanted)

    def _ask(self, key: bytes, entry: _Entry) -> None:
        self._begin_to_wait(key)
        self._unpublished.append((entry.asked_of, key))

    def _begin_to_wait(self, key: bytes) -> None:
        self._asked_s.pop(key, None)
        self._asked_s[key] = self._clock()

    def _ask_another(self, key: bytes, entry: _Entry) -> None:
        entry.asked_of, feature = next(iter(entry.wanted_by.values()))
        self.num_bytes += feature.num_input_bytes - entry.num_bytes
        entry.num_bytes = feature.num_input_bytes
        self._ask(key, entry)
