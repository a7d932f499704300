"""The embedding API: what `EngineCore` promises to a program that drives it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from engine_core import (
    EngineConfig,
    EngineCore,
    EngineRequest,
    InvalidConfigError,
    InvalidRequestError,
    PrefixCacheReset,
    SamplingParams,
)
from ipc.vocabulary import ExtraKeySpan, RequestOutput
from tests.checking_runner import CheckingRunner, expected_output

B = 4
VOCAB = 1000
IDS = itertools.count()


def make_engine(num_blocks: int = 32, *, runner: CheckingRunner | None = None, **settings) -> EngineCore:
    config = EngineConfig(block_size=B, max_num_seqs=settings.pop("max_num_seqs", 8), **settings)
    return EngineCore(config, runner or CheckingRunner(num_blocks, B, vocab_size=VOCAB))


def make_request(prompt: Sequence[int], max_tokens: int | None = 4, request_id: str | None = None, **fields):
    sampling = fields.pop("sampling", {})
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, **sampling)
    return EngineRequest(request_id or f"r{next(IDS)}", list(prompt), params, **fields)


def run(engine: EngineCore, after_first_step: Sequence[EngineRequest] = ()) -> dict[str, list[RequestOutput]]:
    """Step until nothing is left; outputs by request."""
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
        for request in after_first_step:
            engine.add_request(request)
        after_first_step = ()
    assert_idle(engine)
    return outputs


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.new_token_ids]


def assert_idle(engine: EngineCore) -> None:
    """No request, no block or slot in use, every `ref_cnt` 0, every cached block findable, and those kept no longer
    queued.
    """
    kv = engine._scheduler.kv
    assert not engine.has_unfinished_requests() and not engine._scheduler.running and not len(engine._scheduler.waiting)
    assert not kv.tables and engine._scheduler._sharing.is_idle() and engine._scheduler.turns.is_idle()
    assert all(block.ref_cnt == 0 for block in kv.pool.blocks)
    kept = [block.block_id for block in kv.pool.blocks if block.keep is not None]
    assert sorted([block.block_id for block in kv.pool.free_queue] + kept) == list(range(kv.pool.num_blocks))
    assert len(kept) == kv.pool.kept.num_blocks == kv.pool.kept.num_free_blocks
    hashed = {block.block_hash for block in kv.pool.blocks if block.block_hash is not None}
    assert hashed == set(kv.pool.tree.copies())


def complete(engine: EngineCore, prompt: Sequence[int], max_tokens: int = 4, **fields) -> list[RequestOutput]:
    request = make_request(prompt, max_tokens, **fields)
    engine.add_request(request)
    return run(engine)[request.request_id]


class TestOutputs:
    def test_tokens_come_one_step_at_a_time_and_end_with_a_reason(self):
        outputs = complete(make_engine(), range(10), 3)
        assert [len(output.new_token_ids) for output in outputs] == [1, 1, 1]
        assert [output.finish_reason for output in outputs] == [None, None, "length"]
        assert tokens_of(outputs) == expected_output(range(10), 3, VOCAB)

    def test_without_max_tokens_a_request_fills_its_context(self):
        engine = make_engine(max_model_len=16)
        outputs = complete(engine, range(10), None)
        assert len(tokens_of(outputs)) == 6 and outputs[-1].finish_reason == "length"

    def test_stop_tokens_end_a_request_and_are_named(self):
        first, second = expected_output(range(10), 2, VOCAB)
        outputs = complete(make_engine(), range(10), 8, sampling={"stop_token_ids": (second,)})
        assert tokens_of(outputs) == [first, second]
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", second)

    def test_nothing_ends_a_request_before_its_least_number_of_tokens(self):
        second = expected_output(range(10), 2, VOCAB)[1]
        sampling = {"stop_token_ids": (second,), "min_tokens": 3}
        outputs = complete(make_engine(), range(10), 8, sampling=sampling)
        assert len(outputs) == 8

    def test_end_of_sequence_ends_a_request_unless_it_is_ignored(self):
        eos = expected_output(range(10), 2, VOCAB)[1]
        runner = CheckingRunner(32, B, vocab_size=VOCAB, eos_token_ids=frozenset({eos}))
        outputs = complete(make_engine(runner=runner), range(10), 8)
        assert len(outputs) == 2 and (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", None)
        runner = CheckingRunner(32, B, vocab_size=VOCAB, eos_token_ids=frozenset({eos}))
        assert len(complete(make_engine(runner=runner), range(10), 8, sampling={"ignore_eos": True})) == 8

    @pytest.mark.parametrize("num_tokens", [1, B - 1, B, B + 1, 2 * B])
    def test_cached_tokens_of_a_repeated_prompt(self, num_tokens: int):
        engine = make_engine()
        cold, warm = (complete(engine, range(num_tokens)) for _ in range(2))
        assert tokens_of(cold) == tokens_of(warm)
        assert {output.num_cached_tokens for output in cold} == {0}
        assert {output.num_cached_tokens for output in warm} == {num_tokens - 1}

    def test_the_next_turn_of_a_chat_reuses_the_generated_tokens_too(self):
        engine = make_engine()
        history = list(range(10))
        for _ in range(3):
            outputs = complete(engine, history, 6)
            history = history + tokens_of(outputs) + [7, 8, 9]
            # the last sampled token was never computed
            reusable = len(history) - 4
            assert complete(engine, history, 1)[0].num_cached_tokens == reusable


class TestBatching:
    def test_strangers_do_not_change_each_other(self):
        engine = make_engine(64)
        requests = [make_request(range(start, start + 3 + start), 5) for start in range(8)]
        for request in requests:
            engine.add_request(request)
        outputs = run(engine)
        for request in requests:
            assert tokens_of(outputs[request.request_id]) == expected_output(request.prompt_token_ids, 5, VOCAB)

    @pytest.mark.parametrize("budget", [1, 3, 4, 5, 64])
    def test_prompts_are_computed_in_chunks_within_the_budget(self, budget: int):
        engine = make_engine(max_num_batched_tokens=budget, max_num_seqs=1)
        complete(engine, range(21), 2)
        assert max(engine.runner.steps) <= budget
        assert sum(engine.runner.steps) == 21 + 1

    def test_decodes_share_the_step_with_prefill_chunks(self):
        engine = make_engine(max_num_batched_tokens=8)
        engine.add_request(make_request(range(4), 8))
        engine.step()
        engine.add_request(make_request(range(100, 120), 1))
        engine.step()
        assert engine.runner.steps == [4, 8]

    def test_a_long_prefill_leaves_room_for_others(self):
        engine = make_engine(64, max_num_batched_tokens=16, long_prefill_token_threshold=4)
        engine.add_request(make_request(range(40), 1))
        engine.step()
        assert engine.runner.steps == [16], "alone, it may use the whole step"
        engine.add_request(make_request(range(100, 108), 1))
        engine.step()
        assert engine.runner.steps == [16, 8]

    def test_no_more_than_max_num_seqs_run(self):
        engine = make_engine(max_num_seqs=2)
        for start in range(5):
            engine.add_request(make_request(range(start, start + 4)))
        engine.step()
        assert (engine.stats().num_running, engine.stats().num_waiting) == (2, 3)
        run(engine)

    def test_identical_prompts_of_one_step_share_blocks(self):
        engine = make_engine()
        for _ in range(4):
            engine.add_request(make_request(range(10), 1))
        outputs = run(engine)
        assert [output[0].num_cached_tokens for output in outputs.values()] == [0, 8, 8, 8]
        assert engine.runner.steps == [10 + 3 * 2]

    def test_without_chunking_a_prompt_is_computed_whole(self):
        engine = make_engine(enable_chunked_prefill=False, max_num_batched_tokens=16)
        assert engine.capabilities.max_model_len == 16
        for start in (0, 100):
            engine.add_request(make_request(range(start, start + 12), 2))
        run(engine)
        assert engine.runner.steps[:2] == [12, 13]


class TestSeveralContinuations:
    @pytest.mark.parametrize("num_tokens", [1, B - 1, B, B + 1, 2 * B, 2 * B + 3])
    @pytest.mark.parametrize("caching", [True, False])
    def test_the_prompt_is_computed_once(self, num_tokens: int, caching: bool):
        engine = make_engine(enable_prefix_caching=caching)
        request = make_request(range(num_tokens), 5, sampling={"n": 3})
        engine.add_request(request)
        outputs = run(engine)[request.request_id]
        for index in range(3):
            own = [output for output in outputs if output.index == index]
            assert tokens_of(own) == expected_output(range(num_tokens), 5, VOCAB)
            assert own[-1].finish_reason == "length"
        assert [output.ends_request for output in outputs] == [False] * 14 + [True]
        # Each further continuation computes the last token of the prompt, whose logits it needs.
        assert sum(engine.runner.steps) == num_tokens + 2 + 3 * 4
        assert engine.runner.num_copies == (2 if num_tokens % B > 1 else 0)

    def test_the_prompt_is_counted_once(self):
        engine = make_engine()
        for _ in range(2):
            complete(engine, range(10), 2, sampling={"n": 4})
        stats = engine.stats()
        assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (20, 9)
        assert stats.prefix_cache_copied == 1

    def test_cached_tokens_are_the_same_for_all(self):
        engine = make_engine()
        complete(engine, range(10), 1)
        assert {output.num_cached_tokens for output in complete(engine, range(10), 3, sampling={"n": 3})} == {9}

    def test_a_continuation_starts_with_the_hashes_of_its_prompt_only(self):
        """The first output completes a block; what another continuation puts there is something else."""
        engine = make_engine()
        engine.add_request(make_request(range(2 * B - 1), 3, sampling={"n": 2}))
        engine.step()
        (other,) = engine._scheduler.waiting
        assert other.num_tokens == 2 * B - 1 and len(other.block_hashes) == 1
        run(engine)

    def test_one_token_each(self):
        outputs = complete(make_engine(), range(10), 1, sampling={"n": 3})
        assert sorted((output.index, output.finish_reason) for output in outputs) == [
            (index, "length") for index in range(3)
        ]

    def test_seeds_differ_between_continuations_and_repeat_between_runs(self):
        request = EngineRequest("r", [1, 2, 3], SamplingParams(seed=7, n=3))
        first = make_engine().prepare_request(request)
        seeds = [first.seed, *(first.fork(index).seed for index in (1, 2))]
        assert len(set(seeds)) == 3
        assert first.fork(2).seed == make_engine().prepare_request(request).fork(2).seed

    def test_abort_ends_all(self):
        engine = make_engine(max_num_seqs=2)
        request = make_request(range(10), 50, sampling={"n": 3})
        engine.add_request(request)
        for _ in range(3):
            engine.step()
        with pytest.raises(InvalidRequestError, match="unfinished"):
            engine.add_request(request)
        assert engine.abort_requests([request.request_id]) == [request.request_id]
        assert_idle(engine)

    def test_an_id_is_taken_until_the_last_continuation_ends(self):
        engine = make_engine(max_num_seqs=1)
        request = make_request(range(10), 2, sampling={"n": 2})
        engine.add_request(request)
        while not any(output.finish_reason for output in engine.step().outputs):
            pass
        with pytest.raises(InvalidRequestError, match="unfinished"):
            engine.add_request(request)
        run(engine)
        engine.add_request(request)
        run(engine)

    def test_a_failed_step_ends_all_with_one_error(self):
        engine = make_engine()
        request = make_request(range(10), 50, sampling={"n": 3})
        engine.add_request(request)
        for _ in range(2):
            engine.step()
        engine.runner.fail_next = True
        (output,) = engine.step().outputs
        assert (output.request_id, output.finish_reason) == (request.request_id, "error")
        assert_idle(engine)

    def test_one_that_waits_for_room_needs_no_more_of_it_than_its_own_blocks(self):
        """Without a cache, too: what it shares with the first is no part of it."""
        engine = make_engine(4, enable_prefix_caching=False)
        engine.add_request(make_request(range(100, 102), 2))
        engine.add_request(make_request(range(2 * B + 2), 6, "two", sampling={"n": 2}))
        for _ in range(2):
            engine.step()
        assert engine._scheduler.kv.pool.num_free_blocks == 1 and len(engine._scheduler.waiting) == 1
        assert {output.index for output in engine.step().outputs} == {0, 1}
        run(engine)

    def test_in_a_pool_too_small_for_all_they_take_turns(self):
        engine = make_engine(6)
        request = make_request(range(9), 14, sampling={"n": 4})
        engine.add_request(request)
        outputs = run(engine)[request.request_id]
        for index in range(4):
            own = [output for output in outputs if output.index == index]
            assert tokens_of(own) == expected_output(range(9), 14, VOCAB)


class TestPreemption:
    def test_the_last_admitted_gives_way_and_catches_up(self):
        engine = make_engine(8)
        requests = [make_request(range(start, start + 9), 20) for start in (0, 100)]
        for request in requests:
            engine.add_request(request)
        outputs = run(engine)
        assert engine.stats().preemptions > 0
        for request in requests:
            assert tokens_of(outputs[request.request_id]) == expected_output(request.prompt_token_ids, 20, VOCAB)
            assert {output.num_cached_tokens for output in outputs[request.request_id]} == {0}

    def test_under_the_priority_policy_the_least_urgent_gives_way(self):
        engine = make_engine(8, scheduling_policy="priority")
        urgent = make_request(range(9), 20, "urgent", priority=0)
        patient = make_request(range(100, 109), 20, "patient", priority=5)
        engine.add_request(patient)
        outputs = run(engine, after_first_step=[urgent])
        assert engine.stats().preemptions > 0
        assert outputs["urgent"][-1].finish_reason and list(outputs) == ["patient", "urgent"]
        for request in (urgent, patient):
            assert tokens_of(outputs[request.request_id]) == expected_output(request.prompt_token_ids, 20, VOCAB)

    def test_the_urgent_are_admitted_first(self):
        engine = make_engine(max_num_seqs=1, scheduling_policy="priority")
        for priority, name in ((3, "c"), (1, "a"), (2, "b")):
            engine.add_request(make_request(range(5), 1, name, priority=priority))
        assert list(run(engine)) == ["a", "b", "c"]

    def test_an_id_and_arrival_time_may_come_again_after_an_abort(self):
        engine = make_engine(max_num_seqs=1, scheduling_policy="priority")
        request = make_request(range(5), 1, "again", arrival_time_s=1.0)
        for _ in range(2):
            engine.add_request(request)
            engine.add_request(make_request(range(5), 1, arrival_time_s=1.0))
            engine.abort_requests(["again"])
        engine.add_request(request)
        assert list(run(engine))[-1] == "again"

    def test_a_victim_scheduled_in_this_step_is_withdrawn_from_it(self):
        """The victim fills a block in this very step; nobody may find that block, since it is never computed."""
        engine = make_engine(6, scheduling_policy="priority")
        victim = make_request(range(11), 12, "victim", priority=9)
        engine.add_request(victim)
        urgent = make_request(range(100, 112), 8, "urgent", priority=0)
        again = make_request(range(11), 12, "again", priority=9, arrival_time_s=2e12)
        outputs = run(engine, after_first_step=[urgent, again])
        assert engine.stats().preemptions > 0
        for request in (victim, urgent, again):
            count = request.sampling_params.max_tokens
            assert tokens_of(outputs[request.request_id]) == expected_output(request.prompt_token_ids, count, VOCAB)

    def test_the_budget_of_a_withdrawn_victim_goes_to_others(self):
        """A budget of three for three decodes: the victim was counted first, and its token is given back."""
        engine = make_engine(8, scheduling_policy="priority", max_num_seqs=3, max_num_batched_tokens=3)
        for name, priority in (("victim", 9), ("urgent", 0), ("other", 1)):
            engine.add_request(make_request([priority] * 7, 16, name, priority=priority))
        while not engine.stats().preemptions:
            engine.step()
        assert engine.runner.steps[-1] == 2
        run(engine)

    def test_continuations_that_do_not_fit_together_get_on_one_after_another(self):
        """Each fits the pool alone; equals in priority and arrival, they must not preempt each other in turn."""
        engine = make_engine(
            8,
            scheduling_policy="priority",
            max_num_seqs=2,
            max_num_batched_tokens=6,
            long_prefill_token_threshold=3,
            reserve_full_sequence=False,
        )
        engine.add_request(make_request(range(22), 8, sampling={"n": 2}, read_prefix_cache=False))
        outputs: list[RequestOutput] = []
        for _ in range(200):
            outputs += engine.step().outputs
        assert engine.stats().preemptions > 0
        assert_idle(engine)
        assert len(tokens_of(outputs)) == 16

    def test_nobody_is_admitted_beside_a_preemption(self):
        engine = make_engine(8)
        for start in (0, 100):
            engine.add_request(make_request(range(start, start + 9), 20))
        engine.step()
        engine.add_request(make_request([5], 1, "late"))
        while not engine.stats().preemptions:
            engine.step()
            if engine.stats().preemptions:
                assert engine.stats().num_waiting >= 1
        run(engine)


class TestEnding:
    def test_abort_frees_blocks_at_once_and_says_no_more(self):
        engine = make_engine(max_num_seqs=1)
        engine.add_request(make_request(range(10), 50, "running"))
        engine.add_request(make_request(range(10), 50, "waiting"))
        engine.step()
        assert engine.abort_requests(["running", "waiting", "unknown", "running"]) == ["running", "waiting"]
        assert_idle(engine)
        assert not engine.step().outputs

    def test_an_aborted_request_leaves_its_computed_blocks_in_the_cache(self):
        engine = make_engine()
        engine.add_request(make_request(range(10), 50, "a"))
        engine.step()
        engine.abort_requests(["a"])
        assert complete(engine, range(10), 1)[0].num_cached_tokens == 9

    def test_a_failed_step_ends_its_requests_and_leaves_nothing_in_the_cache(self):
        engine = make_engine(max_num_seqs=2)
        for name in ("a", "b", "later"):
            engine.add_request(make_request(range(10), 3, name))
        engine.runner.fail_next = True
        failed = engine.step().outputs
        assert [(o.request_id, o.finish_reason, o.error.code) for o in failed] == [
            ("a", "error", "internal"),
            ("b", "error", "internal"),
        ]
        assert "on fire" in failed[0].error.message
        outputs = run(engine)
        assert tokens_of(outputs["later"]) == expected_output(range(10), 3, VOCAB)
        assert outputs["later"][0].num_cached_tokens == 0
        assert engine.stats().failed_steps == 1

    def test_failures_in_a_row_are_counted(self):
        engine = make_engine()
        for _ in range(2):
            engine.add_request(make_request(range(10)))
            engine.runner.fail_next = True
            engine.step()
        assert engine.num_consecutive_failed_steps == 2
        complete(engine, range(10))
        assert engine.num_consecutive_failed_steps == 0

    def test_a_failed_decode_keeps_what_earlier_steps_computed(self):
        engine = make_engine()
        engine.add_request(make_request(range(10), 9, "a"))
        engine.step()
        engine.runner.fail_next = True
        assert engine.step().outputs[0].finish_reason == "error"
        assert_idle(engine)
        assert complete(engine, range(10), 1)[0].num_cached_tokens == 9


class TestCacheControl:
    def test_a_reset_forgets_what_running_requests_have_and_can_preempt_them(self):
        engine = make_engine()
        request = make_request(range(10), 6)
        engine.add_request(request)
        engine.step()
        assert engine.reset_prefix_cache() == PrefixCacheReset(2, num_blocks_in_use=3, num_requests_in_use=1)
        assert engine.reset_prefix_cache(reset_running_requests=True) == PrefixCacheReset(0)
        assert engine.stats().num_cached_hashes == 0
        outputs = run(engine)[request.request_id]
        assert tokens_of(outputs) == expected_output(range(10), 6, VOCAB)[1:]
        engine.reset_prefix_cache()
        assert complete(engine, range(10), 1)[0].num_cached_tokens == 0

    def test_caching_can_be_switched_off(self):
        engine = make_engine(enable_prefix_caching=False)
        for _ in range(2):
            outputs = complete(engine, range(10))
            assert tokens_of(outputs) == expected_output(range(10), 4, VOCAB)
            assert outputs[0].num_cached_tokens == 0
        stats = engine.stats()
        assert (stats.prefix_cache_queries, stats.prefix_cache_hits, stats.num_cached_hashes) == (0, 0, 0)

    def test_salts_separate(self):
        engine = make_engine()
        salted = {"extra_key_spans": (ExtraKeySpan(0, 1, "cache_salt", "tenant"),)}
        complete(engine, range(10), 1)
        assert complete(engine, range(10), 1, **salted)[0].num_cached_tokens == 0
        assert complete(engine, range(10), 1, **salted)[0].num_cached_tokens == 9

    def test_hits_are_counted_in_tokens_once_per_request(self):
        engine = make_engine(8)
        requests = [make_request(range(start, start + 9), 20) for start in (0, 100)]
        for request in requests:
            engine.add_request(request)
        run(engine)
        stats = engine.stats()
        assert stats.preemptions > 0 and stats.resumed_queries > 0
        assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (18, 0)
        assert stats.generated_tokens == 40


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "param", "numbers"),
        [
            ({"prompt": []}, "prompt_token_ids", "at least one token"),
            ({"prompt": range(64)}, "prompt_token_ids", "64 tokens.*64"),
            ({"prompt": range(200)}, "prompt_token_ids", "200 tokens.*may have 64"),
            ({"prompt": [1, VOCAB]}, "prompt_token_ids", "1000 is outside.*999"),
            ({"prompt": [1, -1]}, "prompt_token_ids", "-1 is outside"),
            ({"max_tokens": 0}, "max_tokens", "is 0"),
            ({"max_tokens": -3}, "max_tokens", "is -3"),
            ({"max_tokens": 65}, "max_tokens", "64, is 65"),
            ({"sampling": {"top_p": 0.0}}, "top_p", "0.0"),
            ({"sampling": {"top_p": 1.5}}, "top_p", "1.5"),
            ({"sampling": {"top_k": -1}}, "top_k", "-1"),
            ({"sampling": {"seed": 2**63}}, "seed", "64-bit"),
            ({"extra_key_spans": (ExtraKeySpan(3, 3, "mm", "x"),)}, "extra_key_spans", r"\[3, 3\)"),
            ({"extra_key_spans": (ExtraKeySpan(-1, 3, "mm", "x"),)}, "extra_key_spans", r"\[-1, 3\)"),
            (
                {"extra_key_spans": (ExtraKeySpan(60, 61, "k" * 256, "x"),)},
                "extra_key_spans",
                "kind: has 256 bytes.*255",
            ),
            ({"extra_key_spans": (ExtraKeySpan(60, 61, "mm", b"x" * 5000),)}, "extra_key_spans", "key: has 5000 bytes"),
            ({"extra_key_spans": (ExtraKeySpan(60, 61, "mm", "\ud800"),)}, "extra_key_spans", "key: is not valid"),
            ({"extra_key_spans": (ExtraKeySpan(0, None, "mm", "x"),) * 17}, "extra_key_spans", "17 spans.*1088"),
            ({"sampling": {"top_k": 2**63}}, "top_k", "9223372036854775808"),
            ({"arrival_time_s": float("nan")}, "arrival_time_s", "nan"),
            ({"request_id": "a\0001"}, "request_id", "NUL"),
            ({"sampling": {"min_p": 1.5}}, "min_p", "1.5"),
            ({"sampling": {"presence_penalty": 2.5}}, "presence_penalty", "2.5"),
            ({"sampling": {"frequency_penalty": -3.0}}, "frequency_penalty", "-3.0"),
            ({"sampling": {"repetition_penalty": 0.0}}, "repetition_penalty", "0.0"),
            ({"sampling": {"logit_bias": {VOCAB: 1.0}}}, "logit_bias", "1000 is outside"),
            ({"sampling": {"logit_bias": {1: float("inf")}}}, "logit_bias", "inf"),
            ({"sampling": {"allowed_token_ids": ()}}, "allowed_token_ids", "at least one"),
            ({"sampling": {"allowed_token_ids": (-1,)}}, "allowed_token_ids", "-1 is outside"),
            ({"sampling": {"bad_words_token_ids": ((),)}}, "bad_words_token_ids", "empty"),
            ({"sampling": {"bad_words_token_ids": ((1, VOCAB),)}}, "bad_words_token_ids", "1000 is outside"),
            ({"sampling": {"min_tokens": 5}}, "min_tokens", "5"),
            ({"sampling": {"n": 0}}, "n", "is 0"),
            ({"sampling": {"n": 129}}, "n", "128, is 129"),
            ({"sampling": {"logprobs": 21}}, "logprobs", "20, is 21"),
            ({"sampling": {"prompt_logprobs": -1}}, "prompt_logprobs", "is -1"),
        ],
    )
    def test_an_impossible_request_is_refused_by_field_and_number(self, fields: dict, param: str, numbers: str):
        engine = make_engine(32, max_model_len=64)
        with pytest.raises(InvalidRequestError, match=numbers) as refusal:
            engine.add_request(make_request(**({"prompt": range(10)} | fields)))
        assert refusal.value.param == param
        assert_idle(engine)

    @pytest.mark.parametrize("temperature", [-0.1, float("nan"), float("inf")])
    def test_temperature_is_a_number_from_0_up(self, temperature: float):
        request = EngineRequest("r", [1], SamplingParams(temperature=temperature))
        with pytest.raises(InvalidRequestError, match="temperature"):
            make_engine().add_request(request)

    def test_the_longest_possible_prompt_gets_its_one_token(self):
        engine = make_engine(32, max_model_len=64)
        assert len(tokens_of(complete(engine, range(63), 64))) == 1

    def test_a_pool_smaller_than_the_context_limits_requests(self):
        engine = make_engine(4, max_model_len=64)
        assert engine.capabilities.max_model_len == 16
        with pytest.raises(
            InvalidRequestError, match=r"16 tokens.*may have 16.*\(the KV pool of 4 blocks holds no more\)"
        ):
            engine.add_request(make_request(range(16)))
        outputs = complete(engine, range(15), 16)
        assert (len(outputs), outputs[-1].finish_reason) == (1, "length")

    def test_what_windows_give_back_counts(self):
        runner = CheckingRunner(20, B, windows=(2 * B, None), max_model_len=512)
        engine = EngineCore(EngineConfig(block_size=B, max_num_batched_tokens=B, max_num_seqs=1), runner)
        capabilities = engine.capabilities
        # Four blocks for what the window and a step see, and sixteen for everything.
        assert (capabilities.max_model_len, capabilities.is_limited_by_pool) == (16 * B, True)
        assert capabilities.cache_config["kv_cache_size_tokens"] == str(16 * B)
        assert capabilities.cache_config["kv_cache_max_concurrency"] == "1.00"
        config = EngineConfig(block_size=B, max_num_batched_tokens=B, max_num_seqs=1, max_model_len=6 * B)
        capabilities = EngineCore(config, runner).capabilities
        assert (capabilities.max_model_len, capabilities.is_limited_by_pool) == (6 * B, False)
        assert capabilities.cache_config["kv_cache_max_concurrency"] == "2.00"

    def test_an_id_may_be_used_again_once_it_is_free(self):
        engine = make_engine()
        engine.add_request(make_request(range(3), 1, "a"))
        with pytest.raises(InvalidRequestError, match="'a' belongs to an unfinished request"):
            engine.add_request(make_request(range(3), 1, "a"))
        run(engine)
        assert complete(engine, range(3), 1, request_id="a")

    @pytest.mark.parametrize("settings", [{"max_model_len": 1}, {"num_blocks": 1, "block_size": 1}], ids=str)
    def test_an_engine_that_could_serve_no_request_is_not_made(self, settings: dict):
        block_size = settings.get("block_size", B)
        runner = CheckingRunner(settings.get("num_blocks", 8), block_size)
        with pytest.raises(InvalidConfigError, match="at most 1 tokens per request"):
            EngineCore(EngineConfig(**settings), runner)

    @pytest.mark.parametrize(
        "settings",
        [
            {"max_num_seqs": 0},
            {"max_num_batched_tokens": 0},
            {"max_num_seqs": 9, "max_num_batched_tokens": 8},
            {"max_model_len": 0},
            {"watermark": 1.0},
            {"gpu_memory_utilization": 0.0},
            {"cudagraph_capture_sizes": (4, 0)},
            {"long_prefill_token_threshold": -1},
            {"long_prefill_token_threshold": 4, "enable_chunked_prefill": False},
            {"prefix_caching_hash_algo": "md5"},
        ],
        ids=str,
    )
    def test_impossible_settings_are_named(self, settings: dict):
        with pytest.raises(InvalidConfigError) as refusal:
            make_engine(**settings)
        assert any(name in str(refusal.value) for name in settings)
