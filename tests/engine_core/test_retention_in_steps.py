"""What is kept, not written or reset while a whole engine runs: preempted requests, steps ahead, continuations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from engine_core import EngineConfig, EngineCore
from ipc.vocabulary import KeepPrefix
from tests.checking_runner import CheckingRunner
from tests.engine_core.slow_retention import Clock, watch_retention
from tests.engine_core.test_engine import VOCAB, B, assert_idle, make_request


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_engine(clock: Clock, num_blocks: int = 32, **settings: Any) -> EngineCore:
    """Whatever it keeps is checked."""
    settings = {"max_kept_share": 1.0, "max_kept_share_per_tenant": 1.0, "max_num_seqs": 8} | settings
    engine = EngineCore(
        EngineConfig(block_size=B, **settings), CheckingRunner(num_blocks, B, vocab_size=VOCAB, max_model_len=4096)
    )
    watch_retention(engine, clock)
    return engine


def add(engine: EngineCore, request_id: str, prompt: Sequence[int], max_tokens: int, **fields: Any) -> None:
    engine.add_request(make_request(prompt, max_tokens, request_id, **fields))


def is_running(engine: EngineCore, request_id: str) -> bool:
    return any(request.request_id == request_id for request in engine._scheduler.running)


def finish(engine: EngineCore) -> None:
    for _ in range(1000):
        if not engine.has_unfinished_requests():
            break
        engine.step()
    assert_idle(engine)


def num_cached(engine: EngineCore, prompt: Sequence[int]) -> int:
    """Of a prompt that begins so, how many tokens would be found."""
    request = engine.prepare_request(make_request([*prompt, VOCAB - 1], 1))
    return engine._scheduler.kv.get_computed_blocks(request).num_tokens


def num_kept(engine: EngineCore, request_id: str) -> tuple[int, ...]:
    return engine._scheduler.requests[request_id].num_kept_tokens


PROMPT = range(10, 10 + 4 * B)


def test_a_request_that_was_preempted_until_its_time_was_over_keeps_its_prefix_again(clock: Clock):
    engine = make_engine(clock)
    add(engine, "a", PROMPT, 20, keep=(KeepPrefix(4 * B, 60.0),))
    engine.step()
    assert num_kept(engine, "a") == (4 * B,)
    engine.reset_prefix_cache(reset_running_requests=True)
    assert num_kept(engine, "a") == () and num_cached(engine, PROMPT) == 0
    engine.step()
    assert num_kept(engine, "a") == (4 * B,)
    finish(engine)
    assert engine.stats().num_kept_blocks == 4


def test_what_a_preempted_request_keeps_waits_for_it(clock: Clock):
    engine = make_engine(clock, scheduling_policy="priority", num_blocks=16)
    add(engine, "low", PROMPT, 8, keep=(KeepPrefix(4 * B, 60.0),), priority=1)
    engine.step()
    add(engine, "high", range(100, 100 + 10 * B), 2 * B, priority=0)
    while is_running(engine, "low"):
        engine.step()
    assert engine.stats().preemptions == 1 and engine.stats().num_kept_blocks == 4
    while is_running(engine, "high"):
        assert num_cached(engine, PROMPT) == 4 * B
        engine.step()
    finish(engine)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "prefix"])
@pytest.mark.parametrize("reserves", [True, False])
def test_two_requests_that_each_need_most_of_what_is_not_kept_both_end(clock: Clock, policy: str, reserves: bool):
    """The clock stands still, so nothing expires: one after the other gets what is kept, when it is alone."""
    engine = make_engine(clock, 16, scheduling_policy=policy, reserve_full_sequence=reserves)
    add(engine, "kept", PROMPT, 1, keep=(KeepPrefix(4 * B, 60.0),))
    finish(engine)
    for name, first in (("a", 100), ("b", 200)):
        add(engine, name, range(first, first + 8 * B), 7 * B)
    finish(engine)
    assert engine.stats().kept_blocks_given_up > 0


@pytest.mark.parametrize("policy", ["fcfs", "priority", "prefix"])
def test_who_needs_more_than_is_not_kept_has_its_turn_though_small_ones_keep_coming(clock: Clock, policy: str):
    engine = make_engine(clock, 16, scheduling_policy=policy)
    add(engine, "kept", range(8 * B), 1, keep=(KeepPrefix(8 * B, 60.0),))
    finish(engine)
    add(engine, "first small", range(300, 303), 6)
    engine.step()
    add(engine, "large", range(100, 100 + 10 * B), 2, arrival_time_s=1.0)
    for number in range(100):
        add(engine, f"small {number}", [400 + number], 6, arrival_time_s=2.0)
        engine.step()
        if "large" not in engine._scheduler.requests:
            break
    assert "large" not in engine._scheduler.requests
    finish(engine)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_who_waits_for_room_has_it_in_the_step_in_which_something_expires(clock: Clock, runs_ahead: bool):
    """Also beside a request that goes on and on, so that step after step could be scheduled ahead."""
    engine = make_engine(clock, 16, async_scheduling=runs_ahead)
    add(engine, "kept", range(8 * B), 1, keep=(KeepPrefix(8 * B, 60.0),))
    finish(engine)
    add(engine, "long", [500], 4 * B)
    engine.step()
    add(engine, "waits", range(100, 100 + 8 * B), 1)
    for _ in range(4):
        engine.step()
    assert is_running(engine, "long") and "waits" in engine._scheduler.requests
    clock.now_s = 61.0
    for _ in range(1 + runs_ahead):
        engine.step()
    assert is_running(engine, "long") and "waits" not in engine._scheduler.requests, "it is over already"
    finish(engine)


@pytest.mark.parametrize("prompt", [range(10, 10 + 4 * B), range(10, 10 + 4 * B + 2), range(10, 13)])
def test_nothing_of_continuations_that_began_before_a_reset_or_with_what_did_is_found(
    clock: Clock, prompt: Sequence[int]
):
    """One of three runs, two wait for seats with its blocks in view."""
    engine = make_engine(clock, max_num_seqs=1)
    add(engine, "a", prompt, 3 * B, sampling={"n": 3, "ignore_eos": True})
    engine.step()
    assert engine.reset_prefix_cache().num_requests_in_use == 1
    engine._scheduler.max_num_seqs = 8
    engine.step()
    assert is_running(engine, "a\0\x31") and num_cached(engine, prompt) == 0
    sequence = list(engine._scheduler.requests["a\0\x31"].token_ids)
    finish(engine)
    assert num_cached(engine, sequence) == 0
    add(engine, "again", prompt, 3 * B, sampling={"ignore_eos": True})
    engine.step()
    again = list(prompt)
    while engine.has_unfinished_requests():
        again = list(engine._scheduler.requests["again"].token_ids)
        engine.step()
    assert num_cached(engine, again) == len(again), "and what is computed afresh is found, hashes free again"


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_reset_while_a_step_runs_ahead(clock: Clock, runs_ahead: bool):
    engine = make_engine(clock, async_scheduling=runs_ahead)
    add(engine, "a", PROMPT, 4 * B, keep=(KeepPrefix(4 * B, 60.0),), sampling={"ignore_eos": True})
    for _ in range(3):
        engine.step()
    assert (engine._ahead is not None) == runs_ahead
    engine.reset_prefix_cache()
    assert engine.stats().num_kept_blocks == 0
    finish(engine)
    assert num_cached(engine, PROMPT) == 0 and engine.stats().num_cached_hashes == 0


def test_who_waits_for_a_prefix_that_will_not_be_found_any_more_computes_it(clock: Clock):
    """Its producer goes on with what it has."""
    engine = make_engine(clock, long_prefill_token_threshold=B, max_num_batched_tokens=64)
    for name in "abc":
        add(engine, name, PROMPT, 4)
    engine.step()
    assert engine.stats().num_waiting_aside == 2
    engine.reset_prefix_cache()
    engine.step()
    assert is_running(engine, "b") and engine.stats().num_waiting_aside == 1, "the third waits for the second"
    finish(engine)
    assert num_cached(engine, PROMPT) == 4 * B


def test_nobody_waits_for_a_request_that_writes_nothing(clock: Clock):
    engine = make_engine(clock, long_prefill_token_threshold=B, max_num_batched_tokens=64)
    add(engine, "silent", PROMPT, 4, write_prefix_cache=False)
    add(engine, "a", PROMPT, 4)
    engine.step()
    assert is_running(engine, "silent") and is_running(engine, "a") and engine.stats().prefix_waits == 0
    finish(engine)


def test_a_request_of_which_a_step_failed_keeps_nothing(clock: Clock):
    engine = make_engine(clock)
    add(engine, "a", PROMPT, 4, keep=(KeepPrefix(4 * B, 60.0),))
    engine.runner.fail_next = True
    engine.step()
    assert engine.stats().num_kept_blocks == 0
    add(engine, "b", PROMPT, 4, keep=(KeepPrefix(4 * B, 60.0),))
    engine.step()
    engine.runner.fail_next = True
    engine.step()
    assert not engine.has_unfinished_requests()
    assert engine.stats().num_kept_blocks == 4 and num_cached(engine, PROMPT) == 4 * B, "the step before had run"


def test_an_aborted_request_keeps_what_it_was_said_to(clock: Clock):
    engine = make_engine(clock)
    add(engine, "a", PROMPT, 40, keep=(KeepPrefix(4 * B, 60.0),))
    engine.step()
    engine.abort_requests(["a"])
    assert_idle(engine)
    assert engine.stats().num_kept_blocks == 4


def test_an_engine_that_rests_does_not_say_that_it_keeps_what_it_need_not(clock: Clock):
    engine = make_engine(clock)
    add(engine, "a", PROMPT, 1, keep=(KeepPrefix(2 * B, 60.0), KeepPrefix(4 * B, 10.0)))
    finish(engine)
    asked = make_request([*PROMPT, 1], 1)
    for now_s, num_blocks in ((9.0, 4), (10.0, 2), (60.0, 0)):
        clock.now_s = now_s
        assert engine.stats().num_kept_blocks == num_blocks
        assert engine.probe(asked).num_kept_tokens == num_blocks * B
        assert engine.probe(asked).num_hit_tokens == 4 * B
