"""The metric families of engines: what they count themselves, asked for when Prometheus asks us.

An engine counts for all its frontends together, so of several frontends that share one, look at one. It counts from 0
when it is started again; here the sums go on. What it counted between the last answer and its death is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import get_args

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from frontend.engine_calls import EngineSnapshot
from frontend.engine_client import EngineClient
from frontend.engine_errors import EngineUnavailableError
from ipc.stats import RESIDENCY_BOUNDS_S, STEP_TOKENS_BOUNDS, Durations, EngineStats
from ipc.vocabulary import MissReason

from .families import PREFIX

# A scrape must not hang on an engine; most give up after 10 s.
ANSWER_TIMEOUT_S = 2.0

_COUNTERS = {
    "prefix_cache_queries": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "prefix_cache_copied": ("prefix_cache_copied", "Of those found, the tokens at the beginning of a block, copied."),
    "prefix_cache_resumed_queries": ("resumed_queries", "Tokens looked up when preempted requests were resumed."),
    "prefix_cache_resumed_hits": ("resumed_hits", "Tokens found when preempted requests were resumed."),
    "prefix_cache_waits": ("prefix_waits", "How often a request waited for a prefix that another one computed."),
    "kept_blocks_refused": ("kept_blocks_refused", "KV blocks that were to be kept and are not, for want of room."),
    "kept_blocks_given_up": ("kept_blocks_given_up", "KV blocks that were kept and given up before their time."),
    "num_preemptions": ("preemptions", "Preemptions."),
    "engine_steps": ("steps", "Steps that the engine computed."),
    "engine_failed_steps": ("failed_steps", "Steps that failed."),
    "engine_computed_tokens": ("computed_tokens", "Tokens computed, prompts and outputs, also again."),
    "engine_generated_tokens": ("generated_tokens", "Tokens sampled, handed on or not."),
    "encoder_cache_queries": ("encoder_cache_queries", "Pictures that the prefix cache did not cover."),
    "encoder_cache_hits": ("encoder_cache_hits", "Pictures of those that need not be encoded again."),
    "encoder_cache_evictions": ("encoder_cache_evictions", "Encoded pictures that had to make room."),
    "encoder_calls": ("encoder_calls", "Pictures encoded, also again."),
    "lora_placements": ("adapter_placements", "How often a LoRA adapter was put into a slot of the device."),
    "lora_slot_waits": ("adapter_slot_waits", "How often a request began to wait for a slot for its LoRA adapter."),
    "kv_event_batches": ("kv_event_batches", "Batches of KV cache events that were published."),
}
# Gauges: family → field
_LORA = {
    "lora_adapters": ("num_adapters", "LoRA adapters that are loaded."),
    "lora_adapter_bytes": ("adapter_bytes", "What their weights weigh in host memory."),
    "lora_slots": ("adapter_slots", "Slots of the device for LoRA adapters."),
    "lora_slots_in_use": ("adapter_slots_in_use", "Slots of the device that running requests hold."),
}
_MISS_REASONS = tuple(reason for reason in get_args(MissReason) if reason != "none")
# family and field → what it counts, by which reasons
_BY_REASON: dict[str, tuple[str, Sequence[str]]] = {
    "prefix_cache_misses": (
        "Requests that the prefix cache had not whole, by why it had no more.",
        _MISS_REASONS,
    ),
    "prefix_cache_missed_tokens": (
        "Prompt tokens that were not found in the prefix cache, by why.",
        _MISS_REASONS,
    ),
    "kv_event_batches_dropped": (
        "Batches of KV cache events that were not published, or found a subscriber that did not read.",
        ("queue_full", "subscriber_full"),
    ),
}
# family → property of `EngineClient`
_SENT = {
    "mm_inputs_sent": ("num_features_supplied", "Prepared pictures sent to the engine."),
    "mm_input_bytes_sent": ("num_feature_bytes_supplied", "Bytes of the prepared pictures sent to the engine."),
}


_BLOCK_RESIDENCY = {
    "lifetime": "From taking a KV block to evicting what was cached in it.",
    "idle_before_evict": "From the last use of a cached KV block to its eviction.",
    "reuse_gap": "From one use of a cached KV block to the next.",
}


class EngineTotals:
    """One engine's counters over all its lives, as far as they were seen.

    Attributes:
        latest: what it said last, and `latest_s` when, in seconds since 1970.
    """

    def __init__(self) -> None:
        self.latest: EngineSnapshot | None = None
        self.latest_s = 0.0
        self._earlier: Counter[str] = Counter()
        self._earlier_by_reason: dict[str, Counter[str]] = {}
        self._earlier_step_tokens = [0] * (len(STEP_TOKENS_BOUNDS) + 1)
        self._earlier_dropped_messages: Counter[str] = Counter()
        self._earlier_block_residency: dict[str, Durations] = {}

    def update(self, snapshot: EngineSnapshot) -> None:
        if self.latest is not None and self.latest.epoch != snapshot.epoch:
            for field, _ in _COUNTERS.values():
                self._earlier[field] = self.counter(field)
            self._earlier_by_reason = {field: self.by_reason(field) for field in _BY_REASON}
            self._earlier_step_tokens = self.step_tokens
            self._earlier_dropped_messages = self.dropped_messages
            self._earlier_block_residency = self.block_residency
        self.latest, self.latest_s = snapshot, time.time()

    def counter(self, field: str) -> int:
        now: int = 0 if self.latest is None else getattr(self.latest.stats, field)
        return self._earlier[field] + now

    def by_reason(self, field: str) -> Counter[str]:
        """Of a counter that has a number for each reason."""
        now: dict[str, int] = {} if self.latest is None else getattr(self.latest.stats, field)
        return self._earlier_by_reason.get(field, Counter()) + Counter(now)

    @property
    def step_tokens(self) -> list[int]:
        """Steps by size; see `EngineStats`."""
        now = [] if self.latest is None else self.latest.stats.step_tokens
        return _added(self._earlier_step_tokens, now)

    @property
    def block_residency(self) -> dict[str, Durations]:
        """See `EngineStats`."""
        totals = self._earlier_block_residency.copy()
        for name, now in ({} if self.latest is None else self.latest.stats.block_residency).items():
            before = totals.get(name, Durations([], 0.0))
            totals[name] = Durations(_added(before.counts, now.counts), before.sum_s + now.sum_s)
        return totals

    @property
    def dropped_messages(self) -> Counter[str]:
        return self._earlier_dropped_messages + Counter({} if self.latest is None else self.latest.dropped_messages)


def _added(first: Sequence[int], second: Sequence[int]) -> list[int]:
    return [a + b for a, b in itertools.zip_longest(first, second, fillvalue=0)]


class EngineCollector(Collector):
    """Shows engines as they answered last; `refresh` before collecting. With `names_adapters` it says which adapters
    are asked for at the moment.
    """

    def __init__(self, engines: Sequence[EngineClient], model_name: str, *, names_adapters: bool) -> None:
        self._engines = engines
        self._names_adapters = names_adapters
        self._model_name = model_name
        self._totals = [EngineTotals() for _ in engines]
        self._created_s = time.time()

    async def refresh(self) -> None:
        """Ask all engines at once. Takes `ANSWER_TIMEOUT_S` at most; who has not answered shows what it last said."""
        await asyncio.gather(*map(self._refresh_one, self._engines, self._totals))

    async def _refresh_one(self, engine: EngineClient, totals: EngineTotals) -> None:
        # `engine_up` shows it.
        with contextlib.suppress(EngineUnavailableError):
            totals.update(await engine.calls.stats(ANSWER_TIMEOUT_S))

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        for name, (field, what) in _COUNTERS.items():
            family = CounterMetricFamily(PREFIX + name, what, labels=("model_name", "engine"))
            for engine, totals in zip(self._engines, self._totals, strict=True):
                family.add_metric(self._labels(engine), totals.counter(field), created=self._created_s)
            yield family
        for field, (what, reasons) in _BY_REASON.items():
            yield self._by_reason(field, what, reasons)
        for name, (field, what) in _SENT.items():
            yield self._of_client(name, what, field)
        yield self._of_client("engine_restarts", "How often a new engine was found.", "num_restarts")
        yield self._step_tokens()
        yield from self._block_residency()
        yield self._dropped_messages()
        yield self._cache_config()
        if self._names_adapters:
            yield from self._lora_requests()

    def _labels(self, engine: EngineClient, *more: str) -> tuple[str, ...]:
        return (self._model_name, str(engine.index), *more)

    def _gauges(self) -> Iterator[Metric]:
        def gauge(name: str, what: str, *more_labels: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(PREFIX + name, what, labels=("model_name", "engine", *more_labels))

        up = gauge("engine_up", "1 while the engine answers this frontend.")
        running = gauge("num_requests_running", "Continuations that take part in steps.")
        waiting = gauge("num_requests_waiting", "Continuations that wait to be admitted.")
        by_reason = gauge("num_requests_waiting_by_reason", "Continuations that wait, and for what.", "reason")
        usage = gauge("kv_cache_usage_perc", "Share of the KV blocks that requests hold; 1 is all.")
        kept = gauge("kv_kept_blocks", "KV blocks that are kept for a time because requests asked for it.")
        encoder = gauge("encoder_cache_usage_perc", "Share of the encoder cache that is taken; 1 is all.")
        for engine, totals in zip(self._engines, self._totals, strict=True):
            labels = self._labels(engine)
            stats = _stats_now(engine, totals)
            up.add_metric(labels, engine.is_connected)
            running.add_metric(labels, stats.num_running if stats else 0)
            num_waiting = stats.num_waiting if stats else 0
            waiting.add_metric(labels, num_waiting)
            num_aside = stats.num_waiting_aside if stats else 0
            by_reason.add_metric((*labels, "capacity"), num_waiting - num_aside)
            by_reason.add_metric((*labels, "deferred"), num_aside)
            usage.add_metric(labels, stats.kv_cache_usage if stats else 0)
            kept.add_metric(labels, stats.num_kept_blocks if stats else 0)
            encoder.add_metric(labels, _encoder_cache_usage(stats) if stats else 0)
        yield from (up, running, waiting, by_reason, usage, kept, encoder)
        yield from self._lora()

    def _lora(self) -> Iterator[Metric]:
        for name, (field, what) in _LORA.items():
            family = GaugeMetricFamily(PREFIX + name, what, labels=("model_name", "engine"))
            for engine, totals in zip(self._engines, self._totals, strict=True):
                stats = _stats_now(engine, totals)
                family.add_metric(self._labels(engine), getattr(stats, field) if stats else 0)
            yield family

    def _by_reason(self, field: str, what: str, reasons: Sequence[str]) -> Metric:
        family = CounterMetricFamily(PREFIX + field, what, labels=("model_name", "engine", "reason"))
        for engine, totals in zip(self._engines, self._totals, strict=True):
            counts = totals.by_reason(field)
            for reason in reasons:
                family.add_metric(self._labels(engine, reason), counts[reason], created=self._created_s)
        return family

    def _of_client(self, name: str, what: str, field: str) -> Metric:
        """A counter of what this frontend itself saw of each engine."""
        family = CounterMetricFamily(PREFIX + name, what, labels=("model_name", "engine"))
        for engine in self._engines:
            family.add_metric(self._labels(engine), getattr(engine, field), created=self._created_s)
        return family

    def _step_tokens(self) -> Metric:
        family = HistogramMetricFamily(
            PREFIX + "iteration_tokens_total", "Tokens that a step computed.", labels=("model_name", "engine")
        )
        for engine, totals in zip(self._engines, self._totals, strict=True):
            buckets = _cumulated(STEP_TOKENS_BOUNDS, totals.step_tokens)
            family.add_metric(self._labels(engine), buckets, sum_value=totals.counter("computed_tokens"))
        return family

    def _block_residency(self) -> Iterator[Metric]:
        for name, what in _BLOCK_RESIDENCY.items():
            family = HistogramMetricFamily(f"{PREFIX}kv_block_{name}_seconds", what, labels=("model_name", "engine"))
            for engine, totals in zip(self._engines, self._totals, strict=True):
                if (durations := totals.block_residency.get(name)) is not None:
                    buckets = _cumulated(RESIDENCY_BOUNDS_S, durations.counts)
                    family.add_metric(self._labels(engine), buckets, sum_value=durations.sum_s)
            if family.samples:
                yield family

    def _dropped_messages(self) -> Metric:
        family = CounterMetricFamily(
            PREFIX + "dropped_messages",
            "Messages between frontend and engine that their receiver did not use.",
            labels=("model_name", "engine", "receiver", "reason"),
        )
        for engine, totals in zip(self._engines, self._totals, strict=True):
            for receiver, counts in (("engine", totals.dropped_messages), ("frontend", engine.drops.counts)):
                for reason, count in sorted(counts.items()):
                    labels = self._labels(engine, receiver, reason)
                    family.add_metric(labels, count, created=self._created_s)
        return family

    def _cache_config(self) -> Metric:
        name = PREFIX + "cache_config_info"
        family = Metric(name, "The KV cache's settings, as labels.", "gauge")
        for engine in self._engines:
            if (capabilities := engine.capabilities) is None:
                continue
            family.add_sample(
                name,
                {
                    **capabilities.cache_config,
                    "engine": str(engine.index),
                    "num_gpu_blocks": str(capabilities.num_blocks),
                },
                1,
            )
        return family

    def _lora_requests(self) -> Iterator[Metric]:
        """As the peer has it: names in labels, and the time when it was so as the value. One sample for each engine,
        where the peer keeps one for each combination of names that there ever was.
        """
        name = PREFIX + "lora_requests_info"
        family = Metric(name, "The value is a time; the labels, LoRA adapters that were asked for then.", "gauge")
        for engine, totals in zip(self._engines, self._totals, strict=True):
            stats = _stats_now(engine, totals)
            if stats is None or not stats.adapter_slots:
                continue
            family.add_sample(
                name,
                {
                    "model_name": self._model_name,
                    "engine": str(engine.index),
                    "max_lora": str(stats.adapter_slots),
                    "running_lora_adapters": ",".join(stats.running_adapters),
                    "waiting_lora_adapters": ",".join(stats.waiting_adapters),
                },
                totals.latest_s,
            )
        if family.samples:
            yield family


def _stats_now(engine: EngineClient, totals: EngineTotals) -> EngineStats | None:
    """An engine that is gone runs nothing."""
    return totals.latest.stats if engine.is_connected and totals.latest is not None else None


def _encoder_cache_usage(stats: EngineStats) -> float:
    # There is no such cache where the model takes no pictures.
    return stats.encoder_cache_used_bytes / stats.encoder_cache_bytes if stats.encoder_cache_bytes else 0


def _cumulated(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """The buckets of a histogram, as Prometheus has them: each with all below it."""
    names = [*(str(float(bound)) for bound in bounds), "+Inf"]
    return list(zip(names, itertools.accumulate(counts), strict=True))
