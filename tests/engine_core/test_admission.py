"""How long the queue may get: who is refused, why, and what the refused are told about later."""

from __future__ import annotations

import pytest

from engine_core import EngineConfig, EngineCore, EngineOverloadedError, InvalidConfigError
from engine_core.admission import AdmissionGate
from tests.checking_runner import CheckingRunner
from tests.engine_core.test_engine import VOCAB, B, assert_idle, make_engine, make_request, run


def add(engine: EngineCore, num_requests: int, num_prompt_tokens: int = 4, **fields) -> None:
    for _ in range(num_requests):
        engine.add_request(make_request(range(num_prompt_tokens), **fields))


def refusal(engine: EngineCore, num_prompt_tokens: int = 4, **fields) -> EngineOverloadedError:
    before = engine.stats()
    with pytest.raises(EngineOverloadedError) as caught:
        add(engine, 1, num_prompt_tokens, **fields)
    assert engine.stats() == before
    return caught.value


def test_without_limits_nobody_is_refused():
    engine = make_engine(max_num_seqs=1)
    add(engine, 1000)
    assert engine.stats().num_waiting == 1000


def test_what_free_seats_admit_at_once_does_not_wait():
    engine = make_engine(max_num_seqs=2, max_num_queued_requests=3)
    # All at once, before any step: two go to seats, three may wait.
    add(engine, 5)
    error = refusal(engine)
    assert str(error) == "4 requests would wait, at most 3 may (max_num_queued_requests)"
    assert error.reason == "max_num_queued_reqs"
    engine.step()
    assert (engine.stats().num_running, engine.stats().num_waiting) == (2, 3)
    refusal(engine)
    assert len(run(engine)) == 5


def test_room_in_the_queue_is_given_again():
    engine = make_engine(max_num_seqs=1, max_num_queued_requests=1)
    add(engine, 2, max_tokens=2)
    refusal(engine)
    while engine.stats().num_waiting:
        engine.step()
    add(engine, 1)
    refusal(engine)
    run(engine)
    add(engine, 2)
    run(engine)


def test_an_abort_makes_room():
    engine = make_engine(max_num_seqs=1, max_num_queued_requests=1)
    add(engine, 1)
    engine.add_request(make_request(range(4), request_id="waits"))
    refusal(engine)
    engine.abort_requests(["waits"])
    add(engine, 1)


def test_a_limit_of_none_waiting_serves_as_many_as_have_seats():
    engine = make_engine(max_num_seqs=3, max_num_queued_requests=0)
    add(engine, 3)
    refusal(engine)
    run(engine)


def test_prompt_tokens_that_wait_are_limited():
    engine = make_engine(max_num_seqs=2, max_num_queued_tokens=20)
    # The first two have seats, though a step may not have shown it yet; the next two wait.
    add(engine, 4, num_prompt_tokens=10)
    error = refusal(engine, 1)
    assert str(error) == "21 prompt tokens would wait, at most 20 may (max_num_queued_tokens)"
    assert error.reason == "max_num_queued_tokens"
    engine.step()
    refusal(engine, 1)
    run(engine)


def test_a_prompt_longer_than_the_limit_runs_where_a_seat_is_free():
    engine = make_engine(max_num_seqs=1, max_num_queued_tokens=5)
    add(engine, 1, num_prompt_tokens=30)
    refusal(engine, 30)
    run(engine)
    add(engine, 1, num_prompt_tokens=30)


def test_each_continuation_counts_and_the_prompt_once():
    engine = make_engine(max_num_seqs=1, max_num_queued_requests=4, max_num_queued_tokens=10)
    add(engine, 1)
    assert refusal(engine, sampling={"n": 5}).reason == "max_num_queued_reqs"
    add(engine, 1, num_prompt_tokens=10, sampling={"n": 4})
    assert refusal(engine).reason == "max_num_queued_reqs"
    run(engine)


def test_continuations_that_wait_for_seats_are_in_the_queue():
    engine = make_engine(max_num_seqs=2, max_num_queued_requests=3)
    add(engine, 1, sampling={"n": 4})
    engine.step()
    # One runs, three wait for the one free seat: two of them beyond it.
    assert (engine.stats().num_running, engine.stats().num_waiting) == (1, 3)
    add(engine, 1)
    refusal(engine)
    run(engine)


def test_continuations_that_wait_for_seats_bring_no_prompt_tokens():
    engine = make_engine(max_num_seqs=1, max_num_queued_tokens=10)
    add(engine, 1, num_prompt_tokens=8, sampling={"n": 3})
    engine.step()
    add(engine, 1, num_prompt_tokens=10)
    assert str(refusal(engine, 1)).startswith("11 prompt tokens would wait")
    run(engine)


def test_the_preempted_are_not_refused_but_counted():
    engine = make_engine(num_blocks=6, max_num_seqs=2, max_num_queued_requests=1, reserve_full_sequence=False)
    add(engine, 2, num_prompt_tokens=8, max_tokens=12)
    while not engine.stats().preemptions:
        engine.step()
    assert engine.stats().num_waiting == 1
    # Its seat is free, but it will take it itself.
    add(engine, 1)
    refusal(engine)
    assert len(run(engine)) == 3


def test_seats_that_nobody_can_take_for_want_of_blocks_are_not_free():
    engine = make_engine(num_blocks=8, max_num_seqs=100, max_num_queued_requests=2)
    # One holds all blocks but one; the next needs two.
    add(engine, 1, num_prompt_tokens=7 * B - 1, max_tokens=2)
    add(engine, 1, num_prompt_tokens=2 * B - 1, max_tokens=1, read_prefix_cache=False)
    engine.step()
    assert (engine.stats().num_running, engine.stats().num_waiting) == (1, 1)
    add(engine, 1)
    assert str(refusal(engine)).startswith("3 requests would wait, at most 2 may")
    run(engine)
    add(engine, 100)


def test_priority_does_not_get_past_a_full_queue():
    engine = make_engine(max_num_seqs=1, max_num_queued_requests=1, scheduling_policy="priority")
    add(engine, 2, priority=5)
    refusal(engine, priority=-5)
    run(engine)


@pytest.mark.parametrize("name", ["max_num_queued_requests", "max_num_queued_tokens"])
def test_a_negative_limit_is_none(name: str):
    with pytest.raises(InvalidConfigError, match=f"{name}: must be at least 0, is -1"):
        make_engine(**{name: -1})


class TestRetryAfter:
    """The queue's speed is measured with a clock that the test moves."""

    def make(self, **limits) -> tuple[EngineCore, list[float]]:
        config = EngineConfig(block_size=B, max_num_seqs=1)
        engine = EngineCore(config, CheckingRunner(64, B, vocab_size=VOCAB))
        now_s = [0.0]
        limits = {"max_num_queued_requests": None, "max_num_queued_tokens": None} | limits
        engine._gate = AdmissionGate(engine._scheduler, clock=lambda: now_s[0], **limits)
        return engine, now_s

    def pass_time(self, engine: EngineCore, now_s: list[float], steps: int, step_s: float) -> None:
        for _ in range(steps):
            now_s[0] += step_s
            engine.step()

    def test_it_is_as_long_as_the_queue_takes_to_move(self):
        engine, now_s = self.make(max_num_queued_requests=10)
        add(engine, 1 + 10, max_tokens=1)
        # One request per step, one step per 4 s.
        self.pass_time(engine, now_s, steps=5, step_s=4.0)
        add(engine, 5, max_tokens=1)
        assert refusal(engine).retry_after_s == pytest.approx(4.0)
        assert refusal(engine, sampling={"n": 3}).retry_after_s == pytest.approx(12.0)

    def test_it_is_measured_in_what_is_missing(self):
        engine, now_s = self.make(max_num_queued_tokens=100)
        add(engine, 1 + 10, num_prompt_tokens=10, max_tokens=1)
        self.pass_time(engine, now_s, steps=5, step_s=2.0)
        add(engine, 5, num_prompt_tokens=10, max_tokens=1)
        # 10 tokens in 2 s; 30 more than fit.
        assert refusal(engine, 30).retry_after_s == pytest.approx(6.0, rel=0.3)

    def test_it_is_at_least_a_second_and_at_most_a_minute(self):
        engine, now_s = self.make(max_num_queued_requests=10)
        add(engine, 1 + 10, max_tokens=1)
        self.pass_time(engine, now_s, steps=5, step_s=0.001)
        add(engine, 5, max_tokens=1)
        assert refusal(engine).retry_after_s == 1.0
        now_s[0] += 10_000.0
        assert refusal(engine).retry_after_s == 60.0

    def test_a_queue_that_does_not_move_says_half_a_minute(self):
        engine, _ = self.make(max_num_queued_requests=0)
        add(engine, 1)
        assert refusal(engine).retry_after_s == 30.0

    def test_a_time_without_requests_does_not_count(self):
        engine, now_s = self.make(max_num_queued_requests=10)
        now_s[0] += 3600.0
        add(engine, 1 + 10, max_tokens=1)
        self.pass_time(engine, now_s, steps=5, step_s=4.0)
        add(engine, 5, max_tokens=1)
        assert refusal(engine).retry_after_s == pytest.approx(4.0)

    def test_only_the_recent_past_counts(self):
        engine, now_s = self.make(max_num_queued_requests=100)
        add(engine, 100, max_tokens=1)
        self.pass_time(engine, now_s, steps=40, step_s=1.0)
        self.pass_time(engine, now_s, steps=40, step_s=10.0)
        add(engine, 101 - engine.stats().num_waiting, max_tokens=1)
        assert refusal(engine).retry_after_s == pytest.approx(10.0, rel=0.1)


def test_a_refused_request_leaves_nothing_behind():
    engine = make_engine(max_num_seqs=1, max_num_queued_requests=0)
    add(engine, 1)
    for _ in range(50):
        refusal(engine, sampling={"n": 2})
    run(engine)
    assert_idle(engine)
