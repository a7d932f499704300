"""What a step costs depends on what it schedules, not on what waits or is cached. Counted in bytecodes, not in time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, get_args

import pytest

from engine_core.config import SchedulingPolicy
from engine_core.kv_cache import BlockHasher, KVCacheManager
from engine_core.request import Request
from engine_core.runner import StepResult
from engine_core.scheduler import Scheduler
from engine_core.sharing import MAX_WAITS_PER_STEP
from tests.engine_core.cached import cache_apart, cache_chain
from tests.engine_core.make import make_request

B = 16
NUM_RUNNING = 8
HASHER = BlockHasher("sha256", B)


def count_bytecodes(function: Callable[[], object]) -> int:
    """How many Python bytecodes `function` and all it calls execute."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Callable:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def hashed_request(request_id: str, token_ids: list[int]) -> Request:
    request = make_request(request_id, token_ids, max_tokens=10_000)
    HASHER.extend(request)
    return request


def step(scheduler: Scheduler) -> None:
    step = scheduler.schedule()
    scheduler.update(step, StepResult([7 if entry.samples else None for entry in step.scheduled]))


def decoding(policy: str, *, num_cached: int = 0, num_seats: int = NUM_RUNNING, num_blocks: int = 100) -> Scheduler:
    """A scheduler with `NUM_RUNNING` requests in decoding, whose pool also holds `num_cached` cached blocks."""
    kv = KVCacheManager(num_blocks + num_cached, B)
    cached = kv.pool.get_new_blocks(num_cached)
    cache_apart(kv.pool, cached, [block.block_id.to_bytes(32, "big") for block in cached])
    kv.pool.free_blocks(cached)
    scheduler = Scheduler(
        kv,
        max_num_seqs=num_seats,
        max_num_batched_tokens=2048,
        max_model_len=1 << 20,
        hash_blocks=HASHER.extend,
        policy=policy,
    )
    for index in range(NUM_RUNNING):
        scheduler.add(hashed_request(f"r{index}", [index] * 40))
    step(scheduler)
    assert len(scheduler.running) == NUM_RUNNING
    return scheduler


def steps_cost(scheduler: Scheduler) -> int:
    """Bytecodes of as many steps as a block has tokens: each request fills a block and gets a new one."""

    def steps() -> None:
        for _ in range(B):
            step(scheduler)

    num_running = len(scheduler.running)
    cost = count_bytecodes(steps)
    assert len(scheduler.running) == num_running
    return cost


@pytest.mark.parametrize("policy", get_args(SchedulingPolicy))
def test_requests_that_wait_for_a_seat_cost_a_step_nothing(policy: str):
    alone, crowded = decoding(policy), decoding(policy)
    for index in range(10_000):
        crowded.add(make_request(f"w{index}", [index] * 3))
    assert steps_cost(crowded) < 1.05 * steps_cost(alone)


def test_cached_blocks_cost_a_step_nothing():
    assert steps_cost(decoding("fcfs", num_cached=100_000)) < 1.05 * steps_cost(decoding("fcfs"))


@pytest.mark.parametrize("policy", get_args(SchedulingPolicy))
def test_a_long_cached_prompt_that_waits_for_room_is_not_looked_up_in_every_step(policy: str):
    num_cached = 500
    alone = decoding(policy, num_seats=NUM_RUNNING + 1, num_blocks=100 + num_cached)
    beside = decoding(policy, num_seats=NUM_RUNNING + 1, num_blocks=100 + num_cached)
    waiting = hashed_request("long", list(range(num_cached * B)) + [1] * (100 * B))
    blocks = beside.kv.pool.get_new_blocks(num_cached)
    cache_chain(beside.kv.pool, blocks, waiting)
    beside.kv.pool.free_blocks(blocks)
    beside.add(waiting)
    step(beside)
    step(alone)
    assert beside.kv.get_computed_blocks(waiting).num_whole_blocks == num_cached
    cost_of_waiting = steps_cost(beside) - steps_cost(alone)
    assert 0 < cost_of_waiting < B * num_cached / 2, "less than one bytecode a step for every two cached blocks"


def prefilling(num_waiting: int) -> Scheduler:
    """A scheduler with `NUM_RUNNING` requests in decoding and one with a long prompt, for whose prefix others wait."""
    scheduler = decoding("fcfs", num_seats=NUM_RUNNING + 2, num_blocks=200)
    scheduler.long_prefill_token_threshold = B
    prompt = list(range(100 * B))
    for index in range(1 + num_waiting):
        scheduler.add(hashed_request(f"p{index}", prompt))
    for _ in range(-(-num_waiting // MAX_WAITS_PER_STEP)):
        step(scheduler)
    assert scheduler.waiting.num_aside == num_waiting
    return scheduler


def test_requests_that_wait_for_a_prefix_cost_a_step_next_to_nothing():
    few, many = (prefilling(num_waiting) for num_waiting in (1, 500))
    cost_of_few, cost_of_many = steps_cost(few), steps_cost(many)
    assert many.waiting.num_aside == 500
    assert cost_of_many < 1.05 * cost_of_few


def test_a_step_looks_at_so_many_of_those_who_begin_to_wait():
    few, many = decoding("fcfs", num_seats=10), decoding("fcfs", num_seats=10)
    for scheduler, num_waiting in ((few, MAX_WAITS_PER_STEP), (many, 10 * MAX_WAITS_PER_STEP)):
        scheduler.long_prefill_token_threshold = B
        for index in range(1 + num_waiting):
            scheduler.add(hashed_request(f"p{index}", list(range(5 * B))))
    assert count_bytecodes(lambda: step(many)) < 1.1 * count_bytecodes(lambda: step(few))
    assert many.waiting.num_aside == MAX_WAITS_PER_STEP


def test_who_waits_for_room_is_admitted_as_soon_as_there_is_enough():
    scheduler = decoding("fcfs", num_seats=NUM_RUNNING + 1, num_blocks=50)
    waiting = hashed_request("long", list(range(30 * B)))
    scheduler.add(waiting)
    while waiting not in scheduler.running:
        lacking = 30 - scheduler.kv.pool.num_free_blocks
        step(scheduler)
        assert (waiting in scheduler.running) == (lacking <= 0)
        if lacking > 0:
            scheduler.abort([scheduler.running[0].request_id])
    assert len(scheduler.running) > 1
