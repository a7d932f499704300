"""Sharing in flight: a prefix is computed once, however many want it, and whatever becomes of who computes it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import pytest

from engine_core import EngineConfig, EngineCore, EngineOverloadedError, EngineRequest, InvalidRequestError
from engine_core.sharing import MAX_WAITS_PER_STEP
from ipc.vocabulary import ExtraKeySpan, RequestOutput
from tests.checking_runner import CheckingRunner, expected_output
from tests.engine_core.test_engine import VOCAB, assert_idle, make_request, tokens_of
from tests.engine_core.test_features import CAT, DOG, supply
from tests.engine_core.test_features import make_engine as make_engine_with_pictures
from tests.engine_core.test_features import make_request as make_request_with_pictures

B = 4
PROMPT = range(10 * B)  # 10 blocks, so that the last of them recompute a token


def make_engine(num_blocks: int = 256, *, threshold: int = B, block_size: int = B, **settings) -> EngineCore:
    """One in which everybody computes `threshold` tokens of a prompt in a step."""
    settings = {"max_num_seqs": 40, "max_num_batched_tokens": 100, "long_prefill_token_threshold": threshold} | settings
    runner = CheckingRunner(num_blocks, block_size, vocab_size=VOCAB, max_model_len=4096)
    return EngineCore(EngineConfig(block_size=block_size, **settings), runner)


def add(engine: EngineCore, prompts: Iterable[Sequence[int]], **fields) -> list[EngineRequest]:
    requests = [make_request(prompt, **({"max_tokens": 1} | fields)) for prompt in prompts]
    for request in requests:
        engine.add_request(request)
    return requests


def add_named(engine: EngineCore, *names: str, prompt: Sequence[int] = PROMPT, **fields) -> None:
    for name in names:
        add(engine, [prompt], request_id=name, **fields)


def finish(engine: EngineCore) -> dict[str, list[RequestOutput]]:
    """Step until nothing is left. Outputs by request, in the order of their first."""
    outputs: dict[str, list[RequestOutput]] = {}
    num_steps = 0
    while engine.has_unfinished_requests():
        assert engine.has_work_now()
        for output in engine.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
        num_steps += 1
        assert num_steps < 2000, "somebody waits for ever"
    assert_idle(engine)
    return outputs


def check(requests: Iterable[EngineRequest], outputs: dict[str, list[RequestOutput]]) -> None:
    for request in requests:
        num_tokens = request.sampling_params.max_tokens
        for index in range(request.sampling_params.n):
            produced = tokens_of([output for output in outputs[request.request_id] if output.index == index])
            assert produced == expected_output(request.prompt_token_ids, num_tokens, VOCAB)


def running(engine: EngineCore) -> list[str]:
    return [request.request_id for request in engine._scheduler.running]


def waiting(engine: EngineCore) -> list[str]:
    return [request.request_id for request in engine._scheduler.waiting]


def num_aside(engine: EngineCore) -> int:
    return engine.stats().num_waiting_aside


class TestOnce:
    @pytest.mark.parametrize("threshold", [0, 64, 100, 512])
    @pytest.mark.parametrize(("budget", "num_seats"), [(96, 40), (256, 8), (512, 64), (4096, 40)])
    def test_a_prefix_that_many_want_at_once_is_computed_once(self, threshold: int, budget: int, num_seats: int):
        engine = make_engine(
            1024, threshold=threshold, block_size=16, max_num_batched_tokens=budget, max_num_seqs=num_seats
        )
        prompt = [token % VOCAB for token in range(2000)]
        requests = add(engine, [prompt] * 32)
        outputs = finish(engine)
        check(requests, outputs)
        assert engine.stats().computed_tokens == 2000 + 31, "the prefix, and of each other one its last token"
        assert [output[0].num_cached_tokens for output in outputs.values()] == [0] + [1999] * 31

    def test_it_is_not_with_sharing_switched_off(self):
        engine = make_engine(share_in_flight=False)
        add(engine, [PROMPT] * 4)
        finish(engine)
        assert engine.stats().computed_tokens > 3 * len(PROMPT)
        assert engine.stats().prefix_waits == 0

    def test_nor_without_a_cache(self):
        engine = make_engine(enable_prefix_caching=False)
        add(engine, [PROMPT] * 4)
        finish(engine)
        assert engine.stats().computed_tokens == 4 * len(PROMPT)

    def test_those_who_wait_leave_the_whole_step_to_who_computes(self):
        """A threshold is for others who want to run: all of them in the first step, nobody in the second."""
        engine = make_engine()
        add(engine, [PROMPT] * 8)
        finish(engine)
        assert engine.runner.steps == [B, len(PROMPT) - B + 7]

    @pytest.mark.parametrize("num_tail_tokens", [1, B - 1, B, B + 1])
    @pytest.mark.parametrize("full_prompt_hit", ["recompute_last_token", "drop_last_block"])
    def test_whatever_follows_it(self, num_tail_tokens: int, full_prompt_hit: str):
        engine = make_engine(full_prompt_hit=full_prompt_hit)
        prompts = [[*PROMPT, *[500 + index] * num_tail_tokens] for index in range(6)]
        check(requests := add(engine, prompts), finish(engine))
        assert engine.stats().computed_tokens == len(PROMPT) + len(requests) * num_tail_tokens

    def test_branches_of_a_tree_are_computed_once_each(self):
        """`b` shares ten blocks with `a`, `c` five, `d` twelve with `b`; `b`, which `d` waits for, waits itself."""
        a = list(range(100, 100 + 16 * B))
        b = a[: 10 * B] + list(range(200, 200 + 6 * B))
        c = a[: 5 * B] + list(range(300, 300 + 6 * B))
        d = b[: 12 * B] + list(range(400, 400 + 6 * B))
        for prompts in itertools.permutations([a, b, c, d]):
            engine = make_engine()
            # Somebody else wants to run, too, so that chunks are small.
            strangers = add(engine, [range(700, 900)])
            check(strangers + add(engine, prompts), finish(engine))
            distinct = {tuple(prompt[: end + B]) for prompt in prompts for end in range(0, len(prompt), B)}
            assert engine.stats().computed_tokens == 200 + B * len(distinct), [prompt[-1] for prompt in prompts]

    def test_who_was_preempted_waits_for_another_who_was(self):
        engine = make_engine()
        strangers = add(engine, [range(700, 900)])
        both = add(engine, [PROMPT] * 2, max_tokens=30)
        outputs: dict[str, list[RequestOutput]] = {}
        while engine.stats().num_running < 3:
            outputs |= {output.request_id: [output] for output in engine.step().outputs}
        before, waits = engine.stats().computed_tokens, engine.stats().prefix_waits
        num_done = len(PROMPT) + 1
        engine.reset_prefix_cache(reset_running_requests=True)
        while engine.stats().num_running < 3:
            for output in engine.step().outputs:
                outputs.setdefault(output.request_id, []).append(output)
        stranger = next(r for r in engine._scheduler.running if r.request_id == strangers[0].request_id)
        assert engine.stats().prefix_waits == waits + 1
        assert engine.stats().computed_tokens - before < stranger.num_computed_tokens + num_done + 2 * B
        for request_id, more in finish(engine).items():
            outputs.setdefault(request_id, []).extend(more)
        check(strangers + both, outputs)

    def test_continuations_wait_with_their_request_and_only_once(self):
        engine = make_engine()
        requests = add(engine, [PROMPT, PROMPT], max_tokens=6, sampling={"n": 3})
        check(requests, finish(engine))
        assert engine.stats().prefix_waits == 1
        assert engine.stats().computed_tokens == len(PROMPT) + 1 + 2 * 2 + 2 * 3 * 5


class TestLine:
    def test_who_waits_holds_nothing_and_stops_nobody(self):
        engine = make_engine(12, max_num_seqs=3, max_num_batched_tokens=2 * B)
        add_named(engine, "producer", "waits")
        add_named(engine, "passes", prompt=[500])
        engine.step()
        assert running(engine) == ["producer"], "the other one had its token in this step"
        assert waiting(engine) == ["waits"] and list(engine._scheduler.kv.tables) == ["producer"]
        assert num_aside(engine) == engine.stats().prefix_waits == 1
        finish(engine)

    def test_who_waited_is_before_who_came_later(self):
        engine = make_engine(max_num_seqs=2)
        add_named(engine, "producer", "second", "third")
        add_named(engine, "stranger", prompt=[500] * 50, max_tokens=9)
        add_named(engine, "fourth")
        add_named(engine, "later", prompt=[600] * 9)
        engine.step()
        assert running(engine) == ["producer", "stranger"] and num_aside(engine) == 2
        outputs = list(finish(engine))
        assert [name for name in outputs if name != "stranger"] == ["producer", "second", "third", "fourth", "later"]

    def test_a_more_urgent_one_that_waited_is_the_first_again(self):
        engine = make_engine(max_num_seqs=3, scheduling_policy="priority")
        add_named(engine, "patient", priority=9)
        add_named(engine, "stranger", prompt=range(500, 600), priority=5)
        engine.step()
        add_named(engine, "urgent", priority=1)
        add_named(engine, "passes", prompt=range(600, 700), priority=5)
        engine.step()
        assert num_aside(engine) == 1 and running(engine) == ["stranger", "patient", "passes"]
        add_named(engine, "late", prompt=[700], priority=2)
        assert list(finish(engine))[:3] == ["patient", "urgent", "late"]
        assert engine.stats().computed_tokens == len(PROMPT) + 1 + 2 * 100 + 1

    def test_who_waits_counts_for_the_queues_limits(self):
        engine = make_engine(max_num_seqs=3, max_num_queued_requests=1)
        add_named(engine, "producer", "waits", "waits too")
        engine.step()
        assert num_aside(engine) == 2
        add_named(engine, "one more")
        with pytest.raises(EngineOverloadedError, match="2 requests would wait, at most 1 may"):
            add_named(engine, "too many")
        finish(engine)

    def test_a_step_looks_at_no_more_than_some(self):
        engine = make_engine(max_num_batched_tokens=2 * B, max_num_seqs=2)
        add(engine, [range(1000 - B, 1000)], max_tokens=20)
        engine.step()
        add(engine, [PROMPT[:-1]] * (2 * MAX_WAITS_PER_STEP))
        engine.step()
        assert num_aside(engine) == 0, "there is no seat for a second one"
        engine = make_engine(max_num_batched_tokens=2 * B, max_num_seqs=3)
        add_named(engine, "other", prompt=range(500, 600))
        add(engine, [PROMPT] * (2 * MAX_WAITS_PER_STEP))
        engine.step()
        assert num_aside(engine) == 0, "no budget is left"
        engine.step()
        finish(engine)
        assert engine.stats().computed_tokens == 100 + len(PROMPT) + 2 * MAX_WAITS_PER_STEP - 1


class TestWithoutTheProducer:
    """It is in the middle of the prompt when something happens to it."""

    def start(self, **settings) -> EngineCore:
        engine = make_engine(**settings)
        add_named(engine, "stranger", prompt=range(500, 600))
        add_named(engine, "producer", "second", "third", "fourth")
        for _ in range(3):
            engine.step()
        assert running(engine) == ["stranger", "producer"] and num_aside(engine) == 3
        return engine

    def test_aborted_the_first_who_waited_goes_on_where_it_was(self):
        engine = self.start()
        engine.abort_requests(["producer"])
        engine.step()
        assert running(engine) == ["stranger", "second"] and waiting(engine) == ["third", "fourth"]
        outputs = finish(engine)
        assert outputs["second"][0].num_cached_tokens == 3 * B
        assert engine.stats().computed_tokens == 100 + len(PROMPT) + 2

    def test_aborted_with_all_others_the_last_one_gets_on(self):
        engine = self.start()
        engine.abort_requests(["stranger", "producer", "second", "third"])
        assert not running(engine) and engine.has_work_now()
        assert list(finish(engine)) == ["fourth"]

    def test_preempted_it_goes_first_and_they_wait_again(self):
        engine = self.start()
        engine.reset_prefix_cache(reset_running_requests=True)
        assert not running(engine) and engine.has_work_now()
        engine.step()
        assert running(engine) == ["stranger", "producer"] and num_aside(engine) == 3
        assert list(finish(engine)) == ["producer", "second", "third", "fourth", "stranger"]
        assert engine.stats().computed_tokens == 3 * 2 * B + 100 + len(PROMPT) + 3

    def test_preempted_for_want_of_blocks_its_waiters_do_not_keep_it_out(self):
        engine = make_engine(
            14, max_num_seqs=4, reserve_full_sequence=False, max_num_batched_tokens=2 * B, max_model_len=11 * B
        )
        requests = add(engine, [range(500, 500 + 6 * B)], max_tokens=4 * B)
        requests += add(engine, [PROMPT] * 3, max_tokens=2)
        check(requests, finish(engine))
        assert engine.stats().preemptions > 0 and engine.stats().prefix_waits > 0

    @pytest.mark.parametrize("fails_late", [False, True])
    def test_if_its_step_fails_the_next_one_begins_where_that_step_did(self, fails_late: bool):
        engine = self.start()
        engine.runner.fail_next, engine.runner.fails_late = True, fails_late
        failed = engine.step().outputs
        assert [output.request_id for output in failed] == ["stranger", "producer"]
        outputs = finish(engine)
        assert list(outputs) == ["second", "third", "fourth"]
        assert outputs["second"][0].num_cached_tokens == 3 * B

    def test_if_the_step_fails_that_gave_them_the_prefix_they_end_with_it(self):
        engine = make_engine()
        add_named(engine, "producer", "second", "third")
        engine.step()
        engine.runner.fail_next = True
        assert [output.finish_reason for output in engine.step().outputs] == ["error"] * 3
        assert_idle(engine)

    @pytest.mark.parametrize("names", [["second"], ["third"], ["second", "third", "fourth"]])
    def test_who_is_aborted_while_it_waits_is_gone(self, names: list[str]):
        engine = self.start()
        engine.abort_requests(names)
        assert num_aside(engine) == 3 - len(names)
        others = [name for name in ("second", "third", "fourth") if name not in names]
        assert list(finish(engine)) == ["producer", *others, "stranger"]

    def test_an_id_may_come_again_while_others_waited_for_the_one_before(self):
        engine = self.start()
        engine.abort_requests(["producer", "second"])
        add_named(engine, "second", prompt=PROMPT[: 2 * B])
        add_named(engine, "producer", prompt=range(700, 720))
        with pytest.raises(InvalidRequestError):
            add_named(engine, "third")
        outputs = finish(engine)
        assert set(outputs) == {"stranger", "producer", "second", "third", "fourth"}
        assert engine.stats().computed_tokens == 100 + len(PROMPT) + 1 + 1 + 20

    def test_nobody_waits_for_one_after_another_for_ever(self):
        """More urgent ones come, get as far as the one before them, and are given up; the cache is reset each time."""
        engine = make_engine(scheduling_policy="priority")
        add_named(engine, "stranger", prompt=range(500, 600))
        add_named(engine, "waits", priority=1)
        num_producers = 0
        while "waits" not in running(engine):
            engine.abort_requests([f"producer {num_producers}"])
            engine.reset_prefix_cache(reset_running_requests=True)
            num_producers += 1
            add_named(engine, f"producer {num_producers}", priority=-1)
            engine.step()
            assert num_producers < 20
        assert num_producers == engine.stats().prefix_waits + 1 > 2
        finish(engine)


class TestWhoNeverWaits:
    """There is nothing to wait for, or the one that computes it is not the quickest to have it."""

    def num_waits(self, *requests: EngineRequest, **settings: str) -> int:
        engine = make_engine(**settings)
        add_named(engine, "stranger", prompt=range(700, 900))
        for request in requests:
            engine.add_request(request)
            engine.step()
        finish(engine)
        return engine.stats().prefix_waits

    def test_for_another_prompt(self):
        assert self.num_waits(make_request(PROMPT), make_request(PROMPT)) == 1
        assert self.num_waits(make_request(PROMPT), make_request([500, *PROMPT])) == 0

    def test_for_another_tenant(self):
        salts = [(ExtraKeySpan(0, 1, "cache_salt", salt),) for salt in ("a", "b")]
        requests = [make_request(PROMPT, extra_key_spans=salt) for salt in salts]
        assert self.num_waits(*requests) == 0

    def test_for_what_is_not_to_be_read_from_the_cache(self):
        for fields in ({"read_prefix_cache": False}, {"sampling": {"prompt_logprobs": 0}}):
            engine = make_engine(threshold=B - 1)
            add(engine, [PROMPT])
            add(engine, [PROMPT] * 2, **fields)
            finish(engine)
            assert engine.stats().prefix_waits == 0

    def test_for_less_than_a_block(self):
        common = range(B, 2 * B - 1)
        requests = [make_request([*range(B), *common, 500, *PROMPT]), make_request([*range(B), *common, 600, *PROMPT])]
        assert self.num_waits(*requests) == 0

    def test_for_a_last_block_that_it_would_drop(self):
        prompt = range(3 * B)
        assert self.num_waits(make_request(prompt), make_request(prompt)) == 1
        assert self.num_waits(make_request(prompt), make_request(prompt), full_prompt_hit="drop_last_block") == 0

    def test_for_what_it_has(self):
        prompt = range(2 * B)
        engine = make_engine()
        add(engine, [prompt])
        finish(engine)
        add_named(engine, "stranger", prompt=range(700, 900))
        add_named(engine, "anew", read_prefix_cache=False, prompt=prompt)
        add_named(engine, "has all", prompt=prompt)
        assert [output.request_id for output in engine.step().outputs] == ["has all"]
        finish(engine)

    def test_for_who_is_behind(self):
        """Half of the prompt is cached, and somebody computes it anew from its beginning."""
        engine = make_engine()
        add(engine, [PROMPT[: 5 * B]])
        finish(engine)
        add_named(engine, "stranger", prompt=range(700, 900))
        add_named(engine, "anew", read_prefix_cache=False, prompt=[*PROMPT, 500])
        engine.step()
        add_named(engine, "quick", prompt=[*PROMPT, 600])
        engine.step()
        assert running(engine) == ["stranger", "anew", "quick"]
        finish(engine)
        assert engine.stats().prefix_waits == 0


class TestPictures:
    def test_a_picture_in_the_prefix_is_asked_for_once_and_encoded_once(self):
        engine = make_engine_with_pictures(long_prefill_token_threshold=B, max_num_seqs=8)
        texts = [list(range(100, 120)), list(range(200, 220))]
        requests = [make_request_with_pictures([texts[0], CAT, texts[1], DOG, [number]]) for number in range(5)]
        for request in requests:
            engine.add_request(request)
        outputs: dict[str, list[RequestOutput]] = {}
        while engine.has_unfinished_requests():
            supply(engine, requests)
            assert engine.has_work_now()
            for output in engine.step().outputs:
                outputs.setdefault(output.request_id, []).append(output)
        check(requests, outputs)
        assert_idle(engine)
        assert engine._features.is_idle()
        assert sorted(engine.runner.encoded) == sorted(set(engine.runner.encoded))
        assert engine.stats().prefix_waits > 0
        num_prefix_blocks = (len(requests[0].prompt_token_ids) - 1) // B
        num_own = len(requests[0].prompt_token_ids) - num_prefix_blocks * B
        num_decoded = sum(len(tokens_of(output)) - 1 for output in outputs.values())
        assert engine.stats().computed_tokens == num_prefix_blocks * B + len(requests) * num_own + num_decoded

    def test_a_producer_that_ends_for_want_of_its_picture_leaves_its_work_to_the_next(self):
        engine = make_engine_with_pictures(long_prefill_token_threshold=B, max_num_seqs=8)
        text = list(range(100, 130))
        first, second = (make_request_with_pictures([text, CAT, [number]]) for number in range(2))
        engine.add_request(first)
        engine.add_request(second)
        engine.runner.encoder_fails[first.mm_features[0].key] = RuntimeError("no")
        outputs: dict[str, list[RequestOutput]] = {}
        while engine.has_unfinished_requests():
            supply(engine, [first, second])
            assert engine.has_work_now()
            for output in engine.step().outputs:
                outputs.setdefault(output.request_id, []).append(output)
            if engine.stats().encoder_calls:
                engine.runner.encoder_fails.clear()
        assert outputs[first.request_id][-1].finish_reason == "error"
        check([second], outputs)
        assert outputs[second.request_id][0].num_cached_tokens == B, "what the first one had computed by then"
        assert_idle(engine)
