"""Random workloads whose every hit is compared with that of `slow_cache`, and every slot and output checked.

Some tens of each kind in the usual run; a thousand with `-m slow`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, get_args

import pytest

from engine_core import EngineOverloadedError, EngineRequest, SamplingParams
from engine_core.config import SchedulingPolicy
from ipc.vocabulary import ExtraKeySpan
from tests.engine_core.slow_cache import WatchedRunner, watch
from tests.engine_core.test_random_operations import Workload

POLICIES = get_args(SchedulingPolicy)

WINDOWS: Sequence[tuple[int | None, ...]] = (
    (None,),
    (None,),
    (None,),
    (3,),
    (8,),
    (None, 8),
    (2, None),
    (None, 6, 6, 13),
)
SPANS = (
    ExtraKeySpan(0, None, "lora", "a"),
    ExtraKeySpan(0, None, "lora", "b"),
    ExtraKeySpan(0, 1, "cache_salt", "a"),
    ExtraKeySpan(0, 1, "cache_salt", "lora"),
    ExtraKeySpan(5, 6, "cache_salt", "b"),
    ExtraKeySpan(3, 9, "mm", "cat"),
    ExtraKeySpan(3, 9, "mm", "dog"),
    ExtraKeySpan(4, 9, "mm", "cat"),
    ExtraKeySpan(10, 14, "mm", "cat"),
    ExtraKeySpan(6, 8, "prompt_embeds", b"cat"),
    ExtraKeySpan(7, 11, "of another frontend", "a"),
    ExtraKeySpan(7, 13, "of another frontend", "a"),
    ExtraKeySpan(7, 12, "of another frontend", "b"),
    ExtraKeySpan(7, None, "of another frontend", "b"),
)
# Of salts the peer's layout has no place, so in it these are equal to others.
MORE_SALTS = (ExtraKeySpan(5, 6, "cache_salt", "a"), ExtraKeySpan(6, 7, "cache_salt", "b"))


class HitsWorkload(Workload):
    """Prompts that part from each other anywhere, with other extra keys anywhere, in an engine that is watched."""

    block_sizes = (1, 2, 3, 4, 5, 8)
    runner_class = WatchedRunner

    def __init__(self, rng: random.Random, policy: str) -> None:
        super().__init__(rng, policy)
        self.cache = watch(self.engine)

    def more_settings(self) -> dict[str, Any]:
        rng = self.rng
        return {
            "prefix_match_unit": rng.choice(["token", "token", "block"]),
            "prefix_caching_hash_algo": rng.choice(["sha256", "sha256", "sha256_cbor", "xxhash"]),
            "prefix_caching_hash_seed": "1",
            "share_in_flight": rng.random() < 0.7,
            "window_retention": rng.choice(["all", "all", "prompt_tail"]),
        }

    def windows(self) -> tuple[int | None, ...]:
        return self.rng.choice(WINDOWS)

    def operations(self) -> dict[Callable[[], None], int]:
        return super().operations() | {self.add_siblings: 4}

    def add(self) -> None:
        self.add_prompt(self.some_prompt())

    def add_siblings(self) -> None:
        """So that one computes what the others need."""
        prompt = self.some_prompt() + self.some_tokens()
        for _ in range(3):
            self.add_prompt(prompt + self.some_tokens())

    def add_prompt(self, prompt: list[int]) -> None:
        rng, room = self.rng, self.engine.capabilities.max_model_len
        if room < 2:
            return
        prompt = prompt[: room - 1]
        request = EngineRequest(
            f"r{self.num_added}",
            prompt,
            SamplingParams(
                temperature=0.0,
                max_tokens=min(rng.choice([1, 2, 5, 12, room]), room),
                n=rng.choice([1, 1, 1, 1, 2, 3]),
                prompt_logprobs=rng.choice([None] * 15 + [0]),
            ),
            self.some_spans(len(prompt)),
            priority=rng.randrange(3),
            arrival_time_s=float(self.num_added),
            read_prefix_cache=rng.random() < 0.95,
            **self.more_fields(len(prompt)),
        )
        if not request.write_prefix_cache:
            self.cache.silent.add(request.request_id)
        self.num_added += 1
        try:
            self.engine.add_request(request)
        except EngineOverloadedError:
            return
        self.remember(request)

    def some_prompt(self) -> list[int]:
        """Something seen before up to anywhere, and tokens that were seen there before, too, or not."""
        rng = self.rng
        prompt: list[int] = []
        if self.prompts and rng.random() < 0.85:
            request_id = rng.choice(list(self.prompts)[-8:])
            prompt = self.prompts[request_id] + self.produced[request_id]
            if rng.random() < 0.7:
                prompt = prompt[: rng.randint(0, len(prompt))]
        return prompt + self.some_tokens()

    def some_tokens(self) -> list[int]:
        return self.rng.choices(range(3), k=self.rng.choice([1, 1, 2, 3, 7, 20]))

    def some_spans(self, num_prompt_tokens: int) -> tuple[ExtraKeySpan, ...]:
        rng = self.rng
        is_peers = self.config.prefix_caching_hash_algo.endswith("_cbor")
        spans = rng.sample(SPANS if is_peers else SPANS + MORE_SALTS, k=rng.choice([0, 0, 0, 0, 1, 1, 2, 3]))
        # Only pictures of the very same span are told apart by the sender's order.
        spans.sort(key=lambda span: span.kind == "mm" and SPANS.index(span) + 1)
        return tuple(span for span in spans if span.start < num_prompt_tokens)


class CutHash:
    """A hash of which only so many bits are left."""

    def __init__(self, whole: Any, num_bits: int) -> None:
        self.whole, self.num_bits = whole, num_bits

    def digest(self) -> bytes:
        return bytes([self.whole.digest()[0] % (1 << self.num_bits)])


class CollidingWorkload(HitsWorkload):
    """Different blocks have equal hashes all the time, which may cost hits."""

    def __init__(self, rng: random.Random, policy: str) -> None:
        super().__init__(rng, policy)
        self.cache.allows_shorter_hits = self.retention.allows_unfound = True
        whole, num_bits = self.engine._hasher._hash, rng.choice([0, 1, 2, 2, 2, 4])
        self.engine._hasher._hash = lambda data: CutHash(whole(data), num_bits)


def run_workloads(policy: str, rounds: range, make: type[HitsWorkload] = HitsWorkload) -> Counter[str]:
    """What happened in them."""
    happened: Counter[str] = Counter()
    for round_ in rounds:
        workload = make(random.Random(f"{policy} {round_}"), policy)
        try:
            workload.run(100)
        except BaseException as error:
            error.add_note(f"round {round_} of policy {policy!r}: {workload.config}, {workload.runner.info}")
            raise
        stats = workload.engine.stats()
        happened += workload.cache.happened + workload.retention.happened
        happened += Counter(
            preemptions=stats.preemptions,
            failed_steps=stats.failed_steps,
            steps_ahead=workload.runner.num_ahead,
            waits=stats.prefix_waits,
        )
    return happened


# Without these a run has shown nothing.
EVENTS = {
    "admissions",
    "partial_hits",
    "full_hits",
    "hits_of_the_same_step",
    "hits_in_windows",
    "dropped_partial_hits",
    "preemptions",
    "failed_steps",
    "steps_ahead",
    "waits",
    "kept",
    "kept_in_part",
    "kept_again",
    "expired",
    "displaced",
    "given_up",
    "shared",
}


@pytest.mark.parametrize("policy", POLICIES)
def test_hits_are_as_long_as_they_can_be_and_never_longer(policy: str):
    happened = run_workloads(policy, range(20))
    assert happened.keys() >= EVENTS


@pytest.mark.parametrize("policy", POLICIES)
def test_colliding_hashes_cost_hits_and_never_an_output(policy: str):
    happened = run_workloads(policy, range(20), CollidingWorkload)
    # Where hits are lost, few tenants use up their share.
    assert happened.keys() >= EVENTS - {"displaced"} | {"lost_hits"}


@pytest.mark.slow
@pytest.mark.parametrize("make", [HitsWorkload, CollidingWorkload])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_thousand_workloads(policy: str, make: type[HitsWorkload]):
    assert run_workloads(policy, range(1000), make).keys() >= EVENTS
