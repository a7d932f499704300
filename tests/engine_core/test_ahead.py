"""A step that is scheduled while the one before it runs: same outputs and same cache, whatever comes between."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine_core import EngineConfig, EngineCore, EngineRequest, SamplingParams
from engine_core.runner import LaunchedStep, ScheduledRequest, StepResult
from ipc.vocabulary import RequestOutput
from tests.checking_runner import CheckingRunner, expected_output
from tests.engine_core.test_engine import assert_idle

B = 4
VOCAB = 50


class LoggingRunner(CheckingRunner):
    """Writes down what happens when. A step runs until it is waited for."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, B, vocab_size=VOCAB)
        self.log: list[str] = []

    def launch(self, batch: Sequence[ScheduledRequest]) -> LaunchedStep:
        number = len(self.steps) + 1
        self.log.append(f"launch {number}")
        return LoggedStep(super().launch(batch), number, self.log)


class LoggedStep:
    def __init__(self, step: LaunchedStep, number: int, log: list[str]) -> None:
        self._step, self._number, self._log = step, number, log

    def wait(self) -> StepResult:
        self._log.append(f"wait {self._number}")
        return self._step.wait()


def make_engine(num_blocks: int = 32, **settings: object) -> EngineCore:
    config = EngineConfig(**({"block_size": B, "async_scheduling": True} | settings))
    return EngineCore(config, LoggingRunner(num_blocks))


def add(engine: EngineCore, request_id: str, prompt: Sequence[int], max_tokens: int, **params: object) -> None:
    sampling = SamplingParams(**({"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | params))
    engine.add_request(EngineRequest(request_id, list(prompt), sampling))


def finish(engine: EngineCore) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
    assert_idle(engine)
    return outputs


def tokens_of(outputs: Sequence[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.new_token_ids]


def test_the_next_step_is_launched_before_the_tokens_of_this_one_are_waited_for():
    engine = make_engine()
    add(engine, "a", range(6), 3)
    assert tokens_of(finish(engine)["a"]) == expected_output(range(6), 3, VOCAB)
    assert engine.runner.log == ["launch 1", "launch 2", "wait 1", "launch 3", "wait 2", "wait 3"]


def test_nothing_is_launched_ahead_unless_asked_for_or_worth_it():
    engine = make_engine(async_scheduling=None)
    add(engine, "a", range(6), 2)
    finish(engine)
    assert engine.runner.log == ["launch 1", "wait 1", "launch 2", "wait 2"]


def test_a_stop_shows_one_step_late_and_the_token_too_many_is_never_heard_of():
    engine = make_engine()
    expected = expected_output(range(6), 5, VOCAB)
    add(engine, "a", range(6), 20, stop_token_ids=(expected[2],))
    outputs = finish(engine)["a"]
    assert tokens_of(outputs) == expected[:3]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", expected[2])
    assert engine.step().outputs == [] and not engine.has_work_now()
    assert engine.runner.log[-3:] == ["launch 4", "wait 3", "wait 4"]


def test_those_who_stop_leave_the_others_alone():
    engine = make_engine()
    stop = expected_output([1, 2], 4, VOCAB)[3]
    add(engine, "short", [1, 2], 30, stop_token_ids=(stop,))
    add(engine, "ends", [3], 6)
    add(engine, "long", range(9), 30)
    outputs = finish(engine)
    for request_id, prompt, count in (("short", [1, 2], 4), ("ends", [3], 6), ("long", range(9), 30)):
        assert tokens_of(outputs[request_id]) == expected_output(prompt, count, VOCAB)


@pytest.mark.parametrize("num_tokens", range(1, 14))
def test_the_cache_holds_what_it_would_hold_without(num_tokens: int):
    """Blocks that generated tokens fill are found by the next turn, the last of them included."""
    hits = []
    for ahead in (False, True):
        engine = make_engine(async_scheduling=ahead)
        add(engine, "a", range(6), num_tokens)
        answer = tokens_of(finish(engine)["a"])
        add(engine, "b", [*range(6), *answer, 7], 1)
        hits.append((finish(engine)["b"][0].num_cached_tokens, engine.stats().num_cached_hashes))
    assert hits[0] == hits[1]


def test_a_block_is_found_while_its_last_token_is_still_being_computed():
    engine = make_engine()
    answer = expected_output(range(6), 9, VOCAB)
    add(engine, "a", range(6), 9)
    engine.step()
    engine.step()  # token 8 is known, and its K/V is being computed
    assert engine.stats().num_cached_hashes == 2
    add(engine, "b", [*range(6), *answer[:2], 7], 2)
    outputs = finish(engine)
    assert outputs["b"][0].num_cached_tokens == 8
    assert tokens_of(outputs["b"]) == expected_output([*range(6), *answer[:2], 7], 2, VOCAB)


class TestWhatHasToWaitForTheTokens:
    @pytest.mark.parametrize(
        "params", [{"presence_penalty": 0.5}, {"bad_words_token_ids": ((1, 2),)}, {"repetition_penalty": 1.1}]
    )
    def test_rules_that_look_at_them(self, params: dict[str, object]):
        engine = make_engine()
        add(engine, "a", range(6), 4, **params)
        add(engine, "b", range(9), 4)
        finish(engine)
        assert engine.runner.num_ahead == 0

    def test_a_prompt_in_chunks(self):
        engine = make_engine(max_num_seqs=2, max_num_batched_tokens=8)
        add(engine, "a", range(3), 9)
        add(engine, "b", range(30), 2)
        while not (outputs := [output for output in engine.step().outputs if output.request_id == "b"]):
            assert engine._ahead is None
        outputs += finish(engine)["b"]
        assert tokens_of(outputs) == expected_output(range(30), 2, VOCAB)

    def test_whoever_can_be_admitted(self):
        engine = make_engine()
        add(engine, "a", range(6), 9)
        engine.step()
        add(engine, "b", range(5), 2)
        engine.step()  # the step that ran already
        assert engine._ahead is None
        engine.step()
        assert engine._scheduler.requests["b"].num_output_tokens == 1

    def test_continuations_that_are_to_begin(self):
        engine = make_engine()
        add(engine, "a", range(6), 5, n=3)
        outputs = finish(engine)["a"]
        for index in range(3):
            tokens = tokens_of([output for output in outputs if output.index == index])
            assert tokens == expected_output(range(6), 5, VOCAB)
        assert engine.runner.num_ahead

    def test_blocks_that_somebody_must_give_up(self):
        engine = make_engine(9)
        for request_id, start in (("a", 0), ("b", 20)):
            add(engine, request_id, range(start, start + 9), 18)
        outputs = finish(engine)
        assert engine.stats().preemptions > 0 and engine.runner.num_ahead
        for request_id, start in (("a", 0), ("b", 20)):
            assert tokens_of(outputs[request_id]) == expected_output(range(start, start + 9), 18, VOCAB)


class TestWhatComesWhileAStepRuns:
    def test_an_abort(self):
        engine = make_engine()
        for request_id in "ab":
            add(engine, request_id, range(6), 9)
        engine.step()
        assert engine.abort_requests(["a"]) == ["a"]
        outputs = finish(engine)
        assert outputs.keys() == {"b"}
        assert tokens_of(outputs["b"]) == expected_output(range(6), 9, VOCAB)[1:]

    def test_an_abort_of_all_and_a_new_request_of_the_same_name(self):
        engine = make_engine()
        add(engine, "a", range(6), 9)
        engine.step()
        engine.abort_requests(["a"])
        add(engine, "a", range(7), 9)
        assert tokens_of(finish(engine)["a"]) == expected_output(range(7), 9, VOCAB)

    def test_a_reset_that_preempts(self):
        engine = make_engine()
        add(engine, "a", range(6), 9)
        first = tokens_of(engine.step().outputs)
        assert engine.reset_prefix_cache(reset_running_requests=True).num_requests_in_use == 0
        assert first + tokens_of(finish(engine)["a"]) == expected_output(range(6), 9, VOCAB)


class TestFailures:
    def test_a_step_that_fails_takes_the_one_behind_it_along(self):
        engine = make_engine()
        engine.runner.fail_next = engine.runner.fails_late = True
        add(engine, "a", range(6), 9)
        (output,) = engine.step().outputs
        assert (output.finish_reason, output.new_token_ids) == ("error", [])
        assert engine.runner.log == ["launch 1", "launch 2", "wait 1"]
        assert_idle(engine)
        assert engine.stats().num_cached_hashes == 0 and engine.num_consecutive_failed_steps == 1
        add(engine, "a", range(6), 3)
        assert tokens_of(finish(engine)["a"]) == expected_output(range(6), 3, VOCAB)

    @pytest.mark.parametrize("fails_late", [False, True])
    def test_what_the_step_before_it_computed_is_handed_out_first(self, fails_late: bool):
        engine = make_engine()
        add(engine, "a", range(6), 9)
        engine.step()
        engine.runner.fail_next, engine.runner.fails_late = True, fails_late
        (output,) = engine.step().outputs
        assert (output.finish_reason, output.new_token_ids) == (None, expected_output(range(6), 2, VOCAB)[1:])
        assert engine.stats().num_cached_hashes == 2
        (output,) = engine.step().outputs
        assert output.finish_reason == "error"
        assert_idle(engine)
        assert engine.stats().num_cached_hashes == 1, "the failed step was to fill the other block"

    def test_a_new_request_of_an_aborted_ones_name_is_none_of_a_failed_steps(self):
        engine = make_engine()
        add(engine, "a", range(6), 9)
        engine.runner.fails_late = True
        engine.step()
        engine.runner.fail_next = True
        engine.step()
        engine.abort_requests(["a"])
        add(engine, "a", range(7), 3)
        assert tokens_of(finish(engine)["a"]) == expected_output(range(7), 3, VOCAB)
        assert engine.stats().failed_steps == 1

    def test_of_who_was_aborted_meanwhile_nothing_stays_that_a_failed_step_was_to_compute(self):
        engine = make_engine()
        add(engine, "a", range(6), 9)
        engine.step()
        engine.runner.fail_next = engine.runner.fails_late = True
        engine.step()
        assert engine.stats().num_cached_hashes == 2
        engine.abort_requests(["a"])
        assert engine.step().outputs == []
        assert_idle(engine)
        assert engine.stats().num_cached_hashes == 1
        assert engine.stats().failed_steps == 1
