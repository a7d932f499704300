"""Pictures in the scheduler's steps: which tokens can be computed now, and what must be encoded or come first.

A chunk of a prompt reaches into a feature only with what the encoder made of it: from the encoder cache, or made in
this very step from the feature's inputs, which are asked for when neither the prefix cache nor the encoder cache has
it. A request whose inputs have not come waits aside.

Pinned are outputs that a step computes with, and those of a feature that a running request has computed in part; that
request needs nothing else to go on. So whoever lacks room in the encoder cache gets it, in the order of `running`.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

from ipc.vocabulary import MultimodalFeature, RequestError, WantedFeature

from .encoder_cache import CachedOutput, EncoderCache
from .feature_inputs import FeatureInputs, Inputs
from .feature_layout import FeatureUnit, first_embedded
from .request import Request, RequestStatus
from .runner import EncodedFeature
from .stats import FeatureCounters
from .step import RequestFailedError

logger = logging.getLogger(__name__)

_CacheKey: TypeAlias = tuple[bytes, int, bytes]
_Encode: TypeAlias = Callable[[MultimodalFeature, Inputs, int | None], Any]


class FeatureError(RequestFailedError):
    """For want of a feature."""


class Reach(NamedTuple):
    """How many tokens a step can compute. If none, `lacks_inputs` says whether more steps will not help."""

    num_tokens: int
    lacks_inputs: bool = False


@dataclass(slots=True)
class _Plan:
    """What a chunk, as far as it is planned, takes of a step."""

    bytes_to_pin: int = 0
    rows_to_encode: int = 0
    keys: set[_CacheKey] = field(default_factory=set)


class FeatureManager:
    """The encoder cache, the inputs, and what steps may do with them. `request.features` is not empty in any call.

    Args:
        encode: `Runner.encode`.
        embed_bytes: what one row of its output weighs.
        max_rows_per_step: most rows to encode in one step; what must be encoded together may be more, if it is the
            first in its step.
        max_input_bytes, timeout_s: of `FeatureInputs`.
    """

    def __init__(
        self,
        encode: _Encode,
        *,
        embed_bytes: int,
        cache_bytes: int,
        max_rows_per_step: int,
        max_input_bytes: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cache = EncoderCache(cache_bytes)
        self.inputs = FeatureInputs(max_input_bytes, timeout_s, clock)
        self.counters = FeatureCounters()
        self._encode = encode
        self._embed_bytes = embed_bytes
        self._max_rows_per_step = max_rows_per_step
        # Of the present step. Closed: someone found no room in the cache, and those after it must not take more.
        self._num_encoded_rows = 0
        self._is_closed = False
        self._pins: dict[str, dict[_CacheKey, CachedOutput]] = {}
        # Requests that wait for inputs. In the second, with what they have computed: nothing was asked for them yet,
        # for want of room; first come, first served.
        self._aside: dict[str, Request] = {}
        self._unasked: dict[str, tuple[Request, int]] = {}

    def prefetch(self, request: Request, num_computed_tokens: int) -> None:
        """Ask for what a request will need when it is its turn, if there is room."""
        missing = self._missing(request, num_computed_tokens)
        if self._may_ask(missing):
            self.inputs.want(request, missing)

    def is_ready(self, request: Request, num_computed_tokens: int) -> bool:
        """Whether all that is beyond these tokens could be encoded now. If not, it is asked for, and the request waits
        aside until `supply` or `ask_for_more` return it.
        """
        needed = {feature.key for feature in self._beyond(request, num_computed_tokens)}
        for key in self.inputs.keys_for(request) - needed:
            self.inputs.release(request, key)
        missing = self._missing(request, num_computed_tokens)
        if not self.inputs.keys_for(request).issuperset(feature.key for feature in missing):
            if not self._may_ask(missing):
                # It gives up what it holds: others may wait for that as it does for them.
                self.inputs.release_all(request)
            if not self._may_ask(missing):
                self._unasked[request.request_id] = request, num_computed_tokens
                self._aside[request.request_id] = request
                return False
            self.inputs.want(request, missing)
        if all(self.inputs.get(request, feature.key) is not None for feature in missing):
            return True
        self._aside[request.request_id] = request
        return False

    def _may_ask(self, missing: list[MultimodalFeature]) -> bool:
        unknown = self.inputs.unknown(missing)
        return not unknown or (not self._unasked and self.inputs.may_ask(unknown))

    def ask_for_more(self) -> list[Request]:
        """Ask for what found no room before, in order. Returns who waits no longer: another request had it encoded."""
        ready = []
        while (asker := self._next_asker()) is not None:
            request, missing = asker
            del self._unasked[request.request_id]
            self.inputs.want(request, missing)
            if self.inputs.has_all(request):
                ready.append(self._aside.pop(request.request_id))
        return ready

    def _next_asker(self) -> tuple[Request, list[MultimodalFeature]] | None:
        if not self._unasked:
            return None
        request, num_computed_tokens = next(iter(self._unasked.values()))
        missing = self._missing(request, num_computed_tokens)
        return (request, missing) if self.inputs.may_ask(self.inputs.unknown(missing)) else None

    def supply(self, output_id: str, key: bytes, inputs: Inputs, error: RequestError | None) -> list[Request]:
        """Here are the inputs asked of a caller's request, or why there are none; if nobody awaits them, never mind.

        Returns who waited aside for them and has everything now.

        Raises:
            FeatureError: `error`, or they weigh more than was declared.
        """
        num_bytes = sum(array.nbytes for array in inputs.values())
        if error is None:
            self.counters.feature_inputs_received += 1
            self.counters.feature_input_bytes_received += num_bytes
        asked = self.inputs.asked(output_id, key)
        if asked is None:
            return []
        request, feature = asked
        if error is not None:
            raise FeatureError(request, error)
        if num_bytes > feature.num_input_bytes:
            message = f"its inputs have {num_bytes} bytes, {feature.num_input_bytes} were declared"
            raise FeatureError(request, _invalid(request, feature, message))
        complete = [wanting for wanting in self.inputs.supply(key, inputs) if self.inputs.has_all(wanting)]
        return [wanting for wanting in complete if self._aside.pop(wanting.request_id, None) is not None]

    def overdue(self) -> list[FeatureError]:
        """Of whose inputs some did not come in time."""
        message = f"its inputs did not come within {self.inputs.timeout_s:g} s (feature_timeout_s)"
        return [
            FeatureError(request, RequestError("internal", f"{_name(request, feature)}: {message}"))
            for request, feature in self.inputs.overdue()
        ]

    def has_work_now(self) -> bool:
        return self.inputs.is_any_overdue() or self._next_asker() is not None

    def take_wanted(self) -> list[WantedFeature]:
        return self.inputs.take_wanted()

    def begin_step(self) -> None:
        self._num_encoded_rows = 0
        self._is_closed = False

    def reach(self, request: Request, start: int, num_tokens: int, budget: int) -> Reach:
        """How many of the tokens `[start, start + num_tokens)` can be computed in this step.

        They may become more, up to `budget`, where they end among tokens that are only computed together.
        """
        end = start + num_tokens
        plan = _Plan()
        for unit in self._units_from(request, start):
            first = max(unit.start, start)
            if first >= end:
                break
            if unit.indivisible and unit.end > end:
                if first > start or unit.end - start > budget:
                    return Reach(first - start)
                end = unit.end
            needed = unit.needed(first, end)
            if needed and not self._fits(request, needed, plan):
                num_reached = (first if unit.indivisible else first_embedded(needed[0], first)) - start
                return Reach(num_reached, num_reached == 0 and not self._has_inputs(request, needed))
        return Reach(end - start)

    def _fits(self, request: Request, needed: list[MultimodalFeature], plan: _Plan) -> bool:
        """Whether a step that does what is planned could have these, too; then they are planned."""
        num_rows = num_bytes = 0
        own_pins = self._pins.get(request.request_id, {})
        for feature in needed:
            key = _cache_key(request, feature)
            if key in plan.keys or key in own_pins or self.cache.is_pinned(key):
                continue
            plan.keys.add(key)
            num_bytes += feature.num_embeds * self._embed_bytes
            if key not in self.cache:
                num_rows += feature.num_embeds
        if num_rows:
            if self._is_closed or not self._has_inputs(request, needed):
                return False
            others_rows = self._num_encoded_rows + plan.rows_to_encode
            if others_rows and others_rows + num_rows > self._max_rows_per_step:
                return False
        if not self.cache.has_room(plan.bytes_to_pin + num_bytes):
            self._is_closed = True
            return False
        plan.bytes_to_pin += num_bytes
        plan.rows_to_encode += num_rows
        return True

    def load(
        self, request: Request, start: int, num_tokens: int, adapter_slot: int | None = None
    ) -> list[EncodedFeature]:
        """The features of these tokens, as many as `reach` said, by position; encoded if need be, and pinned.
        `adapter_slot` has the request's adapter.

        Raises:
            FeatureError: the encoder failed; the request cannot go on.
        """
        pins = self._pins.setdefault(request.request_id, {})
        needed: dict[int, MultimodalFeature] = {}
        for unit in self._units_from(request, start):
            if unit.start >= start + num_tokens:
                break
            needed |= {f.start: f for f in unit.needed(max(unit.start, start), min(unit.end, start + num_tokens))}
        for feature in needed.values():
            key = _cache_key(request, feature)
            if key not in pins and key in self.cache:
                pins[key] = self.cache.pin(key)
        encoded = []
        for feature in needed.values():
            key = _cache_key(request, feature)
            self._count(request, feature, start, is_hit=key in pins)
            if key not in pins:
                pins[key] = self._encode_into_cache(request, feature, adapter_slot)
            self.inputs.release(request, feature.key)
            encoded.append(EncodedFeature(feature, pins[key].output))
        return encoded

    def _encode_into_cache(
        self, request: Request, feature: MultimodalFeature, adapter_slot: int | None
    ) -> CachedOutput:
        if request.adapter is None or not request.adapter.targets_encoder:
            adapter_slot = None
        inputs = self._inputs_of(request, feature.key)
        assert inputs is not None
        self.counters.encoder_calls += 1
        self._num_encoded_rows += feature.num_embeds
        try:
            output = self._encode(feature, inputs, adapter_slot)
        except Exception as error:
            self.inputs.reject(request, feature.key)
            if isinstance(error, ValueError):
                # No traceback for what clients do, unless one is looked for.
                logger.warning("encode_refused request=%s reason=%r", request.output_id, str(error))
                logger.debug("encode_refused_at request=%s", request.output_id, exc_info=True)
                raise FeatureError(request, _invalid(request, feature, str(error))) from error
            logger.exception("encode_failed request=%s rows=%d", request.output_id, feature.num_embeds)
            reason = f"{_name(request, feature)}: the encoder failed: {type(error).__name__}: {error}"
            raise FeatureError(request, RequestError("internal", reason)) from error
        return self.cache.put(_cache_key(request, feature), output, feature.num_embeds * self._embed_bytes)

    def _count(self, request: Request, feature: MultimodalFeature, start: int, *, is_hit: bool) -> None:
        """A feature counts once, like a prompt's tokens: when its request first comes to it."""
        is_first = feature.start >= start or request.status is not RequestStatus.RUNNING
        if is_first and request.index == 0 and request.num_preemptions == 0:
            self.counters.encoder_cache_queries += 1
            self.counters.encoder_cache_hits += is_hit

    def unpin_computed(self, request: Request) -> None:
        """A step has computed up to `request.num_computed_tokens`: what it has computed in part stays pinned."""
        position = request.num_computed_tokens
        unit = next(self._units_from(request, position), None)
        keep = None
        if unit is not None and unit.start < position and not unit.indivisible:
            keep = _cache_key(request, unit.features[0])
        pins = self._pins.pop(request.request_id, {})
        for key, pinned in pins.items():
            if key != keep:
                self.cache.unpin(pinned)
        if keep in pins:
            self._pins[request.request_id] = {keep: pins[keep]}

    def unpin(self, request: Request) -> None:
        """It runs no longer."""
        for pinned in self._pins.pop(request.request_id, {}).values():
            self.cache.unpin(pinned)

    def forget(self, request: Request) -> None:
        """It is over, in whatever state it was."""
        self.unpin(request)
        self.inputs.release_all(request)
        self._aside.pop(request.request_id, None)
        self._unasked.pop(request.request_id, None)

    def stats(self) -> dict[str, Any]:
        """Of `EngineStats`, what concerns features."""
        return dataclasses.asdict(self.counters) | {
            "encoder_cache_evictions": self.cache.num_evictions,
            "encoder_cache_bytes": self.cache.capacity_bytes,
            "encoder_cache_used_bytes": self.cache.used_bytes,
            "feature_input_bytes": self.inputs.num_bytes,
        }

    def is_idle(self) -> bool:
        """Whether nothing is kept for any request."""
        return not (self._pins or self._aside or self._unasked or len(self.inputs) or self.cache.pinned_bytes)

    def _units_from(self, request: Request, position: int) -> Iterator[FeatureUnit]:
        units = request.feature_units
        for index in range(bisect_right(units, position, key=attrgetter("end")), len(units)):
            yield units[index]

    def _beyond(self, request: Request, position: int) -> tuple[MultimodalFeature, ...]:
        return request.features[bisect_right(request.features, position, key=attrgetter("end")) :]

    def _missing(self, request: Request, num_computed_tokens: int) -> list[MultimodalFeature]:
        """What would have to be encoded, and its inputs are not with the request itself."""
        own = request.inputs
        return [
            feature
            for feature in self._beyond(request, num_computed_tokens)
            if _cache_key(request, feature) not in self.cache and feature.key not in own
        ]

    def _has_inputs(self, request: Request, needed: list[MultimodalFeature]) -> bool:
        """Whether those of them that are not cached could be encoded."""
        return all(
            _cache_key(request, feature) in self.cache or self._inputs_of(request, feature.key) is not None
            for feature in needed
        )

    def _inputs_of(self, request: Request, key: bytes) -> Inputs | None:
        own = request.inputs.get(key)
        return self.inputs.get(request, key) if own is None else own


def _cache_key(request: Request, feature: MultimodalFeature) -> _CacheKey:
    """With the rows: who lies about a key breaks nobody else's step. With the adapter, where it changes the rows."""
    adapter = request.adapter
    return feature.key, feature.num_embeds, b"" if adapter is None or not adapter.targets_encoder else adapter.digest


def _name(request: Request, feature: MultimodalFeature) -> str:
    return f"mm_features[{request.features.index(feature)}]"


def _invalid(request: Request, feature: MultimodalFeature, message: str) -> RequestError:
    name = _name(request, feature)
    return RequestError("invalid", f"{name}: {message}", name)
