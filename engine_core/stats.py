"""What an engine core counts, and the snapshot it gives of itself."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from .request import Request, RequestStatus


@dataclass(slots=True)
class SchedulerCounters:
    """Running totals since start. A prompt counts once, at its first admission, however often it is preempted."""

    steps: int = 0
    preemptions: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    resumed_queries: int = 0
    resumed_hits: int = 0

    def count_admission(self, request: Request, num_cached_tokens: int) -> None:
        """Called while the request still has the status it waited with."""
        if not request.read_prefix_cache:
            return
        if request.index > 0 and request.status is RequestStatus.WAITING:
            return  # its prompt was counted with the first continuation
        if request.status is RequestStatus.PREEMPTED:
            self.resumed_queries += request.num_tokens
            self.resumed_hits += num_cached_tokens
        else:
            self.prefix_cache_queries += request.num_tokens
            self.prefix_cache_hits += num_cached_tokens


class EngineStats(Struct, frozen=True, kw_only=True):
    """A snapshot. Counters run since start; hits and queries are in tokens, once per request.

    `resumed_*` count the same for re-admissions after a preemption. `computed_tokens` includes what preempted
    requests compute again.
    """

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_cached_hashes: int
    kv_cache_usage: float
    steps: int
    failed_steps: int
    preemptions: int
    computed_tokens: int
    generated_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    resumed_queries: int
    resumed_hits: int
