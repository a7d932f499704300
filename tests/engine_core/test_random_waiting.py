"""Random requests that share prefixes while they are computed, under every policy: all end rightly, nothing is left.

Prompts are paths in a small tree, so that much of them is being computed by somebody else; pools and budgets are small,
so that chunks are, and requests give way. Every KV slot is checked.
"""

from __future__ import annotations

import hashlib
from typing import get_args

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine_core import EngineConfig, EngineCore, EngineRequest, SamplingParams
from engine_core.config import FullPromptHit, PrefixMatchUnit, SchedulingPolicy, WindowRetention
from engine_core.request import RequestStatus
from ipc.vocabulary import ExtraKeySpan, KeepPrefix
from tests.checking_runner import CheckingRunner, expected_output
from tests.engine_core.slow_retention import Clock, watch_retention
from tests.engine_core.test_engine import assert_idle

B = 2
VOCAB = 50
LIMIT = 30  # tokens of a request


class TwoBits:
    """A hash with which every fourth prefix is taken for another one."""

    def __init__(self, data: bytes) -> None:
        self.bits = hashlib.sha256(data).digest()[0] % 4

    def digest(self) -> bytes:
        return bytes([self.bits])


class Sharing(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(get_args(SchedulingPolicy)),
        num_blocks=st.integers(LIMIT // B, 60),
        num_seats=st.integers(2, 6),
        budget=st.integers(1, 20),
        threshold=st.integers(0, 5),
        reserves=st.booleans(),
        runs_ahead=st.booleans(),
        full_prompt_hit=st.sampled_from(["recompute_last_token", "drop_last_block"]),
        match_unit=st.sampled_from(["token", "block"]),
        windows=st.sampled_from([(None,), (None,), (None, 5), (3,)]),
        retention=st.sampled_from(["all", "prompt_tail"]),
        hashes_weakly=st.booleans(),
        share=st.sampled_from([0.5, 1.0]),
    )
    def start(
        self,
        policy: SchedulingPolicy,
        num_blocks: int,
        num_seats: int,
        budget: int,
        threshold: int,
        reserves: bool,
        runs_ahead: bool,
        full_prompt_hit: FullPromptHit,
        match_unit: PrefixMatchUnit,
        windows: tuple[int | None, ...],
        retention: WindowRetention,
        hashes_weakly: bool,
        share: float,
    ) -> None:
        config = EngineConfig(
            block_size=B,
            max_model_len=LIMIT,
            max_num_seqs=num_seats,
            max_num_batched_tokens=num_seats + budget,
            long_prefill_token_threshold=threshold,
            scheduling_policy=policy,
            reserve_full_sequence=reserves,
            async_scheduling=runs_ahead,
            full_prompt_hit=full_prompt_hit,
            prefix_match_unit=match_unit,
            window_retention=retention,
            max_kept_share=share,
            max_kept_share_per_tenant=share,
        )
        self.runner = CheckingRunner(num_blocks * len(windows), B, vocab_size=VOCAB, windows=windows)
        self.engine = EngineCore(config, self.runner)
        self.clock = Clock()
        watched = watch_retention(self.engine, self.clock)
        if hashes_weakly:
            self.engine._hasher._hash = TwoBits
            watched.allows_unfound = True
        self.requests: dict[str, EngineRequest] = {}
        self.produced: dict[tuple[str, int], list[int]] = {}

    @rule(
        branches=st.lists(st.integers(0, 1), min_size=1, max_size=4),
        num_tokens=st.integers(1, LIMIT - 2),
        num_more=st.integers(1, 6),
        n=st.sampled_from([1, 1, 1, 2]),
        priority=st.integers(0, 2),
        salt=st.sampled_from(["", "", "", "tenant"]),
        reads=st.sampled_from([True, True, True, False]),
        writes=st.sampled_from([True, True, True, False]),
        keeps=st.sampled_from([0, 0, 5, 50]),
        copies=st.sampled_from([1, 1, 2, 4]),
    )
    def add(
        self,
        branches: list[int],
        num_tokens: int,
        num_more: int,
        n: int,
        priority: int,
        salt: str,
        reads: bool,
        writes: bool,
        keeps: int,
        copies: int,
    ) -> None:
        prompt = [10 * branches[min(place // 8, len(branches) - 1)] + place % 8 for place in range(num_tokens)]
        for _ in range(copies):
            number = len(self.requests)
            request = EngineRequest(
                f"r{number}",
                prompt,
                SamplingParams(temperature=0.0, max_tokens=num_more, n=n, ignore_eos=True),
                (ExtraKeySpan(0, 1, "cache_salt", salt),) if salt else (),
                priority=priority,
                arrival_time_s=float(number),
                read_prefix_cache=reads,
                write_prefix_cache=writes,
                keep=(KeepPrefix(num_tokens, float(keeps), priority),) if keeps and writes else (),
                tenant=salt,
            )
            self.requests[request.request_id] = request
            self.engine.add_request(request)

    @rule(num_steps=st.integers(1, 4))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.engine.has_unfinished_requests():
                assert self.engine.has_work_now()
            for output in self.engine.step().outputs:
                self.produced.setdefault((output.request_id, output.index), []).extend(output.new_token_ids)

    @rule(duration_s=st.sampled_from([1.0, 10.0, 100.0]))
    def time_passes(self, duration_s: float) -> None:
        self.clock.now_s += duration_s

    @rule(fails_late=st.booleans())
    def fail(self, fails_late: bool) -> None:
        self.runner.fail_next, self.runner.fails_late = True, fails_late
        self.steps(1)
        self.runner.fail_next = False

    @rule(place=st.floats(0, 1, exclude_max=True))
    def abort(self, place: float) -> None:
        unfinished = list(self.engine._scheduler.requests.values())
        if unfinished:
            self.engine.abort_requests([unfinished[int(place * len(unfinished))].output_id])

    @rule()
    def abort_who_is_waited_for(self) -> None:
        groups = self.engine._scheduler._sharing._groups.values()
        self.engine.abort_requests([group.producer.output_id for group in groups])

    @rule(place=st.floats(0, 1, exclude_max=True))
    def abort_continuation(self, place: float) -> None:
        unfinished = list(self.engine._scheduler.requests.values())
        if unfinished:
            request = unfinished[int(place * len(unfinished))]
            self.engine.abort_continuations([(request.output_id, request.index)])

    @rule(preempts=st.booleans())
    def reset(self, preempts: bool) -> None:
        self.engine.reset_prefix_cache(reset_running_requests=preempts)

    @invariant()
    def who_waits_holds_nothing(self) -> None:
        scheduler = self.engine._scheduler
        for group in scheduler._sharing._groups.values():
            for waiter in group.waiters.values():
                assert waiter.request_id not in scheduler.kv.tables and waiter.status is not RequestStatus.RUNNING
                assert scheduler.requests[waiter.request_id] is waiter
        assert scheduler.waiting.num_aside == len(scheduler._sharing)
        assert len(scheduler.waiting) + len(scheduler.running) == len(scheduler.requests)

    def teardown(self) -> None:
        num_steps = 0
        while self.engine.has_unfinished_requests():
            self.steps(1)
            num_steps += 1
            assert num_steps <= 2 * LIMIT * len(self.requests), "requests are not getting done"
        assert_idle(self.engine)
        for (request_id, _), produced in self.produced.items():
            assert produced == expected_output(self.requests[request_id].prompt_token_ids, len(produced), VOCAB)


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
