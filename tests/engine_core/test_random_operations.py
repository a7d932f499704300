"""Random operations on a whole engine, with every KV slot checked: outputs right, nothing leaked.

Two seconds per policy in the usual run; sixty with `-m slow`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any, get_args

import msgspec
import pytest

from engine_core import EngineConfig, EngineCore, EngineOverloadedError, EngineRequest, SamplingParams
from engine_core.config import SchedulingPolicy
from engine_core.request import Request
from engine_core.runner import MultimodalInfo
from engine_core.scheduler import Scheduler
from engine_core.waiting_queue import num_sequences, num_waiting_tokens
from ipc.vocabulary import ExtraKeySpan, KeepPrefix
from tests.checking_runner import CheckingRunner, expected_output
from tests.engine_core.slow_retention import Clock, watch_retention
from tests.engine_core.test_engine import assert_idle

VOCAB = 50


def check_short_cuts(scheduler: Scheduler) -> list[int]:
    """Whenever `scheduler` skips a lookup because its result could not be admitted, make it, and see that it could not.

    Returns a list that gets an entry for each such case.
    """
    kv, lacks_room = scheduler.kv, scheduler.kv.still_lacks_room
    cases: list[int] = []

    def checked(request: Request, num_spare_blocks: int) -> bool:
        lacks = lacks_room(request, num_spare_blocks)
        if lacks:
            hit, before, refusal = scheduler._find_hit(request), kv.pool.num_free_blocks, kv._shortage._last
            options = {"reserve_full_sequence": True, "num_spare_blocks": num_spare_blocks}
            assert kv.allocate_slots(request, request.num_tokens - hit.num_tokens, hit, **options) is None
            assert kv.pool.num_free_blocks == before
            kv._shortage._last = refusal  # old as it is, so that the next check tries it too
            cases.append(before)
        return lacks

    kv.still_lacks_room = checked
    return cases


class Workload:
    """One engine with random settings, driven at random; remembers what every request should have produced."""

    block_sizes: Sequence[int] = (1, 2, 4, 16)
    runner_class = CheckingRunner

    def __init__(self, rng: random.Random, policy: str) -> None:
        self.rng = rng
        block_size = rng.choice(self.block_sizes)
        windows = self.windows()
        num_blocks = rng.randint(4, 40) * len(windows)
        max_num_seqs = rng.randint(1, 8)
        chunked = rng.random() < 0.8
        config = EngineConfig(
            block_size=block_size,
            max_model_len=rng.choice([None, 24, 60]),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + rng.randint(1, 40),
            scheduling_policy=policy,
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=rng.choice([0, 3]) if chunked else 0,
            reserve_full_sequence=rng.random() < 0.5,
            watermark=rng.choice([0.0, 0.0, 0.2]),
            eviction_policy=rng.choice(["lru", "unhashed_first", "frequency"]),
            full_prompt_hit=rng.choice(["recompute_last_token", "drop_last_block"]),
            enable_prefix_caching=rng.random() < 0.9,
            max_num_queued_requests=rng.choice([None, None, 3]),
            max_num_queued_tokens=rng.choice([None, None, 40]),
            async_scheduling=rng.random() < 0.5,
            max_kept_share=rng.choice([0.3, 0.5, 1.0]),
            max_kept_share_per_tenant=rng.choice([0.2, 0.5, 1.0]),
        )
        self.config = msgspec.structs.replace(config, **self.more_settings())
        self.runner = self.runner_class(
            num_blocks,
            block_size,
            vocab_size=VOCAB,
            max_model_len=100,
            multimodal=self.multimodal(),
            windows=windows,
            num_adapter_slots=self.num_adapter_slots(),
        )
        self.engine = EngineCore(self.config, self.runner)
        self.clock = Clock()
        self.retention = watch_retention(self.engine, self.clock)
        self.short_cuts = check_short_cuts(self.engine._scheduler)
        self.prompts: dict[str, list[int]] = {}
        self.produced: dict[str, list[int]] = {}
        self.others: dict[str, dict[int, list[int]]] = {}  # of the further continuations
        self.num_added = 0

    def more_settings(self) -> dict[str, Any]:
        return {}

    def multimodal(self) -> MultimodalInfo | None:
        return None

    def windows(self) -> tuple[int | None, ...]:
        return (None,)

    def num_adapter_slots(self) -> int:
        return 0

    def weights_of(self, request_id: str) -> str | None:
        """Of its adapter."""
        return None

    def add(self) -> None:
        rng, room = self.rng, self.engine.capabilities.max_model_len
        if room < 2:
            return
        base = [rng.randrange(3)] * 3 + list(range(10, 40)) if rng.random() < 0.8 else rng.choices(range(VOCAB), k=60)
        prompt = base[: rng.randint(1, min(len(base), room - 1))]
        if self.prompts and rng.random() < 0.3:  # the next turn of something seen before
            request_id = rng.choice(list(self.prompts))
            prompt = (self.prompts[request_id] + self.produced[request_id] + [rng.randrange(VOCAB)])[: room - 1]
        spans = []
        if rng.random() < 0.3:
            spans.append(ExtraKeySpan(0, 1, "cache_salt", rng.choice("ab")))
        if rng.random() < 0.2:
            # A picture's key decides how long it is.
            start, length = rng.randrange(len(prompt)), rng.randint(1, 9)
            spans.append(ExtraKeySpan(start, start + length, "mm", f"{rng.choice('xy')}{length}"))
        request = EngineRequest(
            f"r{self.num_added}",
            prompt,
            SamplingParams(temperature=0.0, max_tokens=rng.randint(1, room), n=rng.choice([1, 1, 1, 2, 3])),
            tuple(spans),
            priority=rng.randrange(3),
            arrival_time_s=float(self.num_added),
            read_prefix_cache=rng.random() < 0.9,
            **self.more_fields(len(prompt)),
        )
        self.num_added += 1
        try:
            self.engine.add_request(request)
        except EngineOverloadedError:
            return
        self.remember(request)

    def more_fields(self, num_prompt_tokens: int) -> dict[str, Any]:
        """Of a request: what is to be kept of it, or that nobody is to find it."""
        rng = self.rng
        if rng.random() < 0.15:
            return {"write_prefix_cache": False}
        keep = [
            KeepPrefix(rng.randint(1, num_prompt_tokens), rng.choice([1.0, 5.0, 20.0, 100.0]), rng.randrange(3))
            for _ in range(rng.choice([0, 0, 0, 1, 1, 2, 4]))
        ]
        if keep and rng.random() < 0.5:
            keep[0] = KeepPrefix(num_prompt_tokens, keep[0].ttl_s, keep[0].priority)
        return {"keep": tuple(keep), "tenant": rng.choice(["", "", "a", "b"])}

    def remember(self, request: EngineRequest) -> None:
        self.prompts[request.request_id], self.produced[request.request_id] = request.prompt_token_ids, []
        self.others[request.request_id] = {index: [] for index in range(1, request.sampling_params.n)}

    def check_queue(self) -> None:
        waiting = self.engine._scheduler.waiting
        assert waiting.num_sequences == sum(map(num_sequences, waiting))
        assert waiting.num_tokens == sum(map(num_waiting_tokens, waiting))

    def step(self) -> None:
        self.runner.fail_next, self.runner.fails_late = self.rng.random() < 0.01, self.rng.random() < 0.5
        for output in self.engine.step().outputs:
            if output.index:
                self.others[output.request_id][output.index] += output.new_token_ids
            else:
                self.produced[output.request_id] += output.new_token_ids

    def abort(self) -> None:
        unfinished = sorted({request.output_id for request in self.engine._scheduler.requests.values()})
        self.engine.abort_requests(self.rng.sample(unfinished, min(len(unfinished), self.rng.randint(1, 3))))

    def abort_continuation(self) -> None:
        unfinished = list(self.engine._scheduler.requests.values())
        for request in self.rng.sample(unfinished, min(len(unfinished), self.rng.randint(1, 3))):
            self.engine.abort_continuations([(request.output_id, request.index)])

    def reset(self) -> None:
        self.engine.reset_prefix_cache(reset_running_requests=self.rng.random() < 0.5)

    def wait(self) -> None:
        self.clock.now_s += self.rng.choice([0.5, 1.0, 4.0, 30.0])

    def operations(self) -> dict[Callable[[], None], int]:
        """With how often to do each."""
        return {self.add: 25, self.step: 70, self.abort: 4, self.abort_continuation: 4, self.reset: 1, self.wait: 8}

    def run(self, num_operations: int) -> None:
        operations, weights = zip(*self.operations().items(), strict=True)
        for operation in self.rng.choices(operations, weights, k=num_operations):
            operation()
            self.check_queue()
        deadline = self.num_added * 1000
        while self.engine.has_unfinished_requests():
            self.step()
            deadline -= 1
            assert deadline, "requests are not getting done"
        assert_idle(self.engine)
        self.clock.now_s += 1000.0
        self.engine.step()
        assert self.engine.stats().num_kept_blocks == 0 and not self.engine._scheduler.kv.pool.kept._tenants
        for request_id, first in self.produced.items():
            for produced in (first, *self.others[request_id].values()):
                weights = self.weights_of(request_id)
                assert produced == expected_output(self.prompts[request_id], len(produced), VOCAB, weights)


def run_for(duration_s: float, policy: str, seed: int, make: Callable[..., Workload] = Workload) -> int:
    deadline = time.monotonic() + duration_s
    rounds = num_short_cuts = num_ahead = num_waits = 0
    # Until each of what is asked for below has happened, however busy the machine is.
    while (
        time.monotonic() < deadline or rounds < 5 or (rounds < 60 and not (num_short_cuts and num_ahead and num_waits))
    ):
        workload = make(random.Random(f"{policy}{seed}{rounds}"), policy)
        try:
            workload.run(200)
        except BaseException as error:
            error.add_note(f"round {rounds} of policy {policy!r}, seed {seed}: {workload.config}")
            raise
        rounds += 1
        num_short_cuts += len(workload.short_cuts)
        num_ahead += workload.runner.num_ahead
        num_waits += workload.engine.stats().prefix_waits
    assert num_short_cuts, "nobody ever waited for room"
    assert num_ahead, "no step was scheduled ahead"
    assert num_waits, "nobody ever waited for a prefix"
    return rounds


@pytest.mark.parametrize("policy", get_args(SchedulingPolicy))
def test_random_operations_leave_an_idle_engine_and_right_outputs(policy: str):
    assert run_for(1.0, policy, seed=1) > 3


@pytest.mark.slow
@pytest.mark.parametrize("policy", get_args(SchedulingPolicy))
def test_sixty_seconds_of_random_operations(policy: str):
    assert run_for(60.0, policy, seed=time.time_ns()) > 100
