"""What the scheduler counts."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import get_args

from ipc.stats import STEP_TOKENS_BOUNDS
from ipc.vocabulary import MissReason

from .request import Request, RequestStatus


def _by_reason() -> dict[str, int]:
    # All of them from the start: another thread may be reading while one is counted.
    return {reason: 0 for reason in get_args(MissReason) if reason != "none"}


@dataclass(slots=True)
class SchedulerCounters:
    """Running totals since start. A prompt counts once, at its first admission, however often it is preempted."""

    steps: int = 0
    preemptions: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prefix_cache_copied: int = 0
    resumed_queries: int = 0
    resumed_hits: int = 0
    prefix_waits: int = 0
    prefix_cache_misses: dict[str, int] = field(default_factory=_by_reason)
    prefix_cache_missed_tokens: dict[str, int] = field(default_factory=_by_reason)
    step_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS_BOUNDS) + 1))

    def count_step(self, num_tokens: int) -> None:
        self.steps += 1
        self.computed_tokens += num_tokens
        self.step_tokens[bisect_left(STEP_TOKENS_BOUNDS, num_tokens)] += 1

    def count_admission(self, request: Request, num_cached_tokens: int, num_copied_tokens: int) -> None:
        """Called while the request still has the status it waited with. The second number is part of the first."""
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
            self.prefix_cache_copied += num_copied_tokens

    def count_miss(self, reason: MissReason, num_tokens: int) -> None:
        """Once per prompt: so many of its tokens were not found."""
        if reason != "none":
            self.prefix_cache_misses[reason] += 1
            self.prefix_cache_missed_tokens[reason] += num_tokens


@dataclass(slots=True)
class FeatureCounters:
    """Running totals since start. A feature counts once, when its request first comes to it."""

    encoder_cache_queries: int = 0
    encoder_cache_hits: int = 0
    encoder_calls: int = 0
    feature_inputs_received: int = 0
    feature_input_bytes_received: int = 0
