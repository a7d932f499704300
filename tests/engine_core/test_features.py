"""Prompts with pictures: what is encoded, asked for, kept and refused, with every KV slot and every row checked."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import msgspec
import pytest

from engine_core import (
    EngineConfig,
    EngineCore,
    EngineRequest,
    InvalidConfigError,
    InvalidRequestError,
    RequestError,
    SamplingParams,
    WantedFeature,
)
from engine_core.feature_inputs import MAX_ASKED
from engine_core.runner import MultimodalInfo, ScheduledRequest, StepResult
from ipc.vocabulary import ExtraKeySpan, RequestOutput
from tests.checking_runner import CheckingRunner, expected_output
from tests.engine_core.test_engine import assert_idle, tokens_of
from tests.feature_prompts import EMBED_BYTES, feature_at, inputs_by_key, inputs_of, mm_spans, prompt_of

B = 4
VOCAB = 1000
IDS = itertools.count()

# What a number shows decides how large it is (`tests.feature_prompts.embed_ranges`).
CAT, DOG, COW, DOT = 13, 34, 5, 7  # 7, 7 and 6 tokens in one piece; 1 token
GRID = 6  # 7 tokens, the last but one a row break
TEXT = list(range(100, 110))


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make_engine(num_blocks: int = 64, *, joins_touching: bool = False, **settings) -> EngineCore:
    config = EngineConfig(block_size=B, max_num_seqs=settings.pop("max_num_seqs", 8), **settings)
    info = MultimodalInfo(EMBED_BYTES, joins_touching)
    engine = EngineCore(config, CheckingRunner(num_blocks, B, vocab_size=VOCAB, multimodal=info))
    engine.clock = Clock()
    engine._features.inputs._clock = engine.clock
    return engine


def make_request(
    parts: Iterable[Sequence[int] | int],
    *,
    tenant: str = "",
    joins_touching: bool = False,
    max_tokens: int = 3,
    sampling: dict | None = None,
    **fields,
) -> EngineRequest:
    token_ids, features = prompt_of(parts, tenant)
    spans = mm_spans(features, joins_touching=joins_touching)
    if tenant:
        spans += (ExtraKeySpan(0, 1, "cache_salt", tenant),)
    fields = {"request_id": f"r{next(IDS)}", "extra_key_spans": spans, "mm_features": tuple(features)} | fields
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, **(sampling or {}))
    return EngineRequest(prompt_token_ids=token_ids, sampling_params=params, **fields)


def features_by_key(requests: Iterable[EngineRequest]) -> dict:
    return {feature.key: feature for request in requests for feature in request.mm_features}


def supply(engine: EngineCore, requests: Iterable[EngineRequest]) -> list[WantedFeature]:
    """Answer what the engine wants now. Returns that."""
    features = features_by_key(requests)
    wanted = engine.take_wanted()
    for item in wanted:
        engine.supply_feature(item.request_id, item.key, inputs_of(features[item.key]))
    return wanted


def run(engine: EngineCore, *requests: EngineRequest, add: bool = True) -> dict[str, list[RequestOutput]]:
    """Add these, answer everything the engine asks, step until nothing is left, and see that outputs are right."""
    outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
    for request in requests if add else ():
        engine.add_request(request)
    while engine.has_unfinished_requests():
        supply(engine, requests)
        assert engine.has_work_now()
        for output in engine.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
    assert_nothing_is_left(engine)
    for request in requests:
        for index in range(request.sampling_params.n):
            produced = tokens_of([output for output in outputs[request.request_id] if output.index == index])
            assert produced == expected_output(request.prompt_token_ids, len(produced), VOCAB)
    return outputs


def assert_nothing_is_left(engine: EngineCore) -> None:
    assert_idle(engine)
    assert engine._features.is_idle()
    assert not engine.has_work_now() and not engine.take_wanted()
    assert engine.stats().feature_input_bytes == 0


class TestWhatIsEncodedAndAskedFor:
    def test_a_picture_is_asked_for_when_its_request_is_added_and_encoded_once(self):
        engine, request = make_engine(), make_request([TEXT, CAT, TEXT])
        engine.add_request(request)
        assert engine.take_wanted() == [WantedFeature(request.request_id, request.mm_features[0].key)]
        assert engine.step().outputs == [] and not engine.has_work_now()
        engine.supply_feature(request.request_id, request.mm_features[0].key, inputs_of(request.mm_features[0]))
        assert engine.has_work_now()
        run(engine, request, add=False)
        assert engine.runner.encoded == [CAT]

    def test_what_the_prefix_cache_has_is_neither_asked_for_nor_encoded(self):
        engine = make_engine()
        run(engine, make_request([TEXT, CAT, TEXT]))
        engine._features.cache.__init__(engine._features.cache.capacity_bytes)
        again = make_request([TEXT, CAT, TEXT, TEXT])
        engine.add_request(again)
        assert engine.take_wanted() == []
        run(engine, again, add=False)
        assert engine.runner.encoded == [CAT]

    def test_a_reset_forgets_what_was_made_of_pictures_too(self):
        engine = make_engine(max_num_batched_tokens=12)
        first = make_request([TEXT, CAT, TEXT])
        engine.add_request(first)
        supply(engine, [first])
        engine.step()
        assert engine.reset_prefix_cache().num_features_in_use == 1, "it computes with its picture"
        assert engine.stats().encoder_cache_used_bytes > 0
        engine.reset_prefix_cache(reset_running_requests=True)
        assert engine.stats().encoder_cache_used_bytes == 0
        run(engine, first, add=False)
        assert engine.runner.encoded == [CAT, CAT]

    def test_a_picture_that_is_in_use_when_the_cache_is_reset_is_not_found_by_others(self):
        """Its request goes on with it, in chunks, and needs nothing anew."""
        engine = make_engine(max_num_batched_tokens=12)
        first, second = make_request([TEXT, CAT, TEXT]), make_request([TEXT, CAT, TEXT])
        engine.add_request(first)
        supply(engine, [first])
        engine.step()
        assert engine.reset_prefix_cache().num_features_in_use == 1
        engine.add_request(second)
        supply(engine, [second])
        run(engine, first, second, add=False)
        assert engine.runner.encoded == [CAT, CAT] and engine.stats().preemptions == 0
        assert_nothing_is_left(engine)

    def test_what_the_encoder_cache_has_is_neither_asked_for_nor_encoded(self):
        engine = make_engine()
        run(engine, make_request([TEXT, CAT, TEXT]))
        elsewhere = make_request([[500], CAT, TEXT])
        engine.add_request(elsewhere)
        assert engine.take_wanted() == []
        run(engine, elsewhere, add=False)
        assert engine.runner.encoded == [CAT]
        stats = engine.stats()
        assert (stats.encoder_cache_queries, stats.encoder_cache_hits, stats.encoder_calls) == (2, 1, 1)
        assert stats.encoder_cache_used_bytes == 7 * EMBED_BYTES

    def test_another_tenants_picture_costs_what_a_new_one_costs(self):
        engine = make_engine()
        costs = []
        for tenant in ("a", "b"):
            before = engine.stats()
            run(engine, make_request([TEXT, CAT, TEXT, DOG], tenant=tenant))
            after = engine.stats()
            costs.append(
                [
                    getattr(after, name) - getattr(before, name)
                    for name in (
                        *("computed_tokens", "encoder_calls", "encoder_cache_queries", "encoder_cache_hits"),
                        *("feature_inputs_received", "feature_input_bytes_received", "prefix_cache_hits"),
                    )
                ]
            )
        assert costs[0] == costs[1]
        assert costs[0][1] == 2

    def test_the_same_picture_twice_in_a_prompt_is_asked_for_and_encoded_once(self):
        engine, request = make_engine(), make_request([TEXT, CAT, TEXT, CAT, [7]])
        engine.add_request(request)
        assert len(supply(engine, [request])) == 1
        run(engine, request, add=False)
        assert engine.runner.encoded == [CAT]

    def test_what_several_requests_want_is_asked_of_one(self):
        engine = make_engine()
        requests = [make_request([[index], CAT, TEXT]) for index in range(3)]
        for request in requests:
            engine.add_request(request)
        assert engine.take_wanted() == [WantedFeature(requests[0].request_id, requests[0].mm_features[0].key)]
        engine.abort_requests([requests[0].request_id])
        assert supply(engine, requests) == [WantedFeature(requests[1].request_id, requests[0].mm_features[0].key)]
        run(engine, *requests[1:], add=False)
        assert engine.runner.encoded == [CAT]

    def test_what_was_asked_before_its_request_ended_is_not_published(self):
        engine, request = make_engine(), make_request([CAT])
        engine.add_request(request)
        engine.abort_requests([request.request_id])
        assert_nothing_is_left(engine)

    def test_inputs_at_hand_are_never_asked_for(self):
        engine, request = make_engine(), make_request([TEXT, CAT, DOG, [7]], sampling={"n": 3})
        engine.add_request(request, inputs_by_key(request.mm_features))
        assert engine.take_wanted() == []
        run(engine, request, add=False)
        assert engine.runner.encoded == [CAT, DOG]
        assert engine.stats().feature_inputs_received == 0

    def test_a_cached_prompt_that_ends_with_a_picture_needs_the_picture_for_its_last_token(self):
        engine = make_engine()
        for expected in (0, 11):
            request = make_request([[3, 4, 5, 6, 8], CAT])  # 12 tokens, 3 whole blocks
            assert run(engine, request)[request.request_id][0].num_cached_tokens == expected
        assert engine.runner.encoded == [CAT]
        engine._features.cache.__init__(engine._features.cache.capacity_bytes)
        request = make_request([[3, 4, 5, 6, 8], CAT])
        assert run(engine, request)[request.request_id][0].num_cached_tokens == 11
        assert engine.runner.encoded == [CAT, CAT]

    def test_without_reading_the_prefix_cache_pictures_are_needed_again(self):
        engine = make_engine()
        for fields in ({}, {"read_prefix_cache": False}):
            run(engine, make_request([TEXT, CAT, TEXT], **fields))
        assert engine.stats().encoder_cache_hits == 1 and engine.stats().computed_tokens > 2 * 27

    @pytest.mark.parametrize("sizes", [(CAT, DOG), (CAT, CAT)])
    def test_the_prompts_of_several_continuations_are_computed_once(self, sizes: tuple[int, ...]):
        engine, request = make_engine(), make_request([TEXT, *sizes], sampling={"n": 4})
        run(engine, request)
        assert engine.runner.encoded == list(dict.fromkeys(sizes))
        assert engine.stats().encoder_cache_queries == 2


class TestSharing:
    def test_pictures_of_equal_size_share_nothing_past_their_beginning(self):
        engine = make_engine()
        hits = []
        for picture in (CAT, CAT, DOG, DOG, CAT):
            request = make_request([TEXT, picture, TEXT])
            hits.append(run(engine, request)[request.request_id][0].num_cached_tokens)
        assert hits == [0, 26, 10, 26, 26]

    def test_order_matters(self):
        engine = make_engine()
        hits = []
        for pictures in ([CAT, DOG], [DOG, CAT], [CAT, DOG]):
            request = make_request([TEXT, *pictures, TEXT])
            hits.append(run(engine, request)[request.request_id][0].num_cached_tokens)
        assert hits == [0, 10, 33]

    def test_the_order_of_pictures_that_see_each_other_matters(self):
        engine = make_engine(joins_touching=True)
        hits = []
        for pictures in ([CAT, CAT, DOG], [CAT, DOG, CAT], [CAT, CAT, DOG]):
            request = make_request([TEXT, *pictures, TEXT], joins_touching=True)
            hits.append(run(engine, request)[request.request_id][0].num_cached_tokens)
        assert hits == [0, 10, 40]

    @pytest.mark.parametrize("joins_touching", [False, True])
    @pytest.mark.parametrize("num_kept", range(1, 9))
    def test_a_hit_may_end_inside_a_picture(self, num_kept: int, joins_touching: bool):
        engine = make_engine(num_blocks=16, joins_touching=joins_touching, max_num_batched_tokens=32)
        prompt = [TEXT[:3], CAT, DOG, TEXT]
        run(engine, make_request(prompt, joins_touching=joins_touching))
        pool = engine._scheduler.kv.pool
        pool.unregister([block for block in pool.blocks if block.block_id >= num_kept])
        request = make_request(prompt, joins_touching=joins_touching)
        cached = run(engine, request)[request.request_id][0].num_cached_tokens
        # The seventh block is not full, but its beginning is copied.
        assert cached == min(num_kept * B, 26)


class TestChunks:
    @pytest.mark.parametrize("budget", [1, 2, 3, 5, 8, 64])
    @pytest.mark.parametrize("parts", [[CAT], [TEXT, CAT, DOG, TEXT], [GRID, GRID, [5], COW, DOT, DOT, CAT]])
    def test_borders_may_fall_inside_pictures(self, budget: int, parts: list):
        engine = make_engine(max_num_batched_tokens=budget, max_num_seqs=1)
        run(engine, make_request(parts))
        assert max(engine.runner.steps) <= budget
        assert engine.runner.encoded == list(dict.fromkeys(part for part in parts if isinstance(part, int)))

    @pytest.mark.parametrize("budget", [14, 15, 20])
    @pytest.mark.parametrize("threshold", [0, 3])
    def test_pictures_that_see_each_other_are_computed_together(self, budget: int, threshold: int):
        engine = make_engine(
            joins_touching=True,
            max_num_batched_tokens=budget,
            max_num_seqs=1,
            long_prefill_token_threshold=threshold,
        )
        run(engine, make_request([TEXT, CAT, DOG, TEXT, COW], joins_touching=True))
        assert 14 in engine.runner.steps or budget > 14

    def test_a_group_too_large_for_what_others_leave_waits_for_a_step_of_its_own(self):
        engine = make_engine(joins_touching=True, max_num_batched_tokens=17, max_num_seqs=4)
        group = make_request([[9], CAT, DOG], joins_touching=True)
        texts = [make_request([[index + 10] * 30], max_tokens=20) for index in range(3)]
        run(engine, *texts, group)
        assert engine.stats().preemptions == 0

    def test_one_picture_may_be_larger_than_the_encoder_budget_but_two_wait_for_each_other(self):
        engine = make_engine(max_num_encoder_tokens=3)
        requests = [make_request([[index], index * 7 + 6], max_tokens=1) for index in range(3)]
        for request in requests:
            engine.add_request(request)
        supply(engine, requests)
        for num_encoded in (1, 2, 3):
            engine.step()
            assert len(engine.runner.encoded) == num_encoded
        run(engine, *requests, add=False)

    def test_without_chunked_prefill_a_prompts_pictures_are_encoded_in_one_step(self):
        engine = make_engine(enable_chunked_prefill=False, max_num_batched_tokens=40, max_num_encoder_tokens=5)
        run(engine, make_request([TEXT, CAT, DOG, TEXT]), make_request([DOG, TEXT]))
        assert engine.runner.steps[0] == 34

    @pytest.mark.parametrize("policy", ["fcfs", "priority"])
    def test_preempted_requests_come_back_right(self, policy: str):
        engine = make_engine(14, max_num_batched_tokens=9, max_num_seqs=4, scheduling_policy=policy)
        requests = [
            make_request([[index], CAT + 7 * index, TEXT, DOG], max_tokens=20, priority=-index) for index in range(4)
        ]
        run(engine, *requests)
        assert engine.stats().preemptions > 0


class TestEncoderCacheRoom:
    def test_requests_that_each_hold_half_of_the_cache_do_not_block_each_other(self):
        engine = make_engine(encoder_cache_bytes=14 * EMBED_BYTES, max_num_batched_tokens=8, max_num_seqs=2)
        # Each holds one picture in part, and then needs another one.
        run(engine, make_request([CAT, COW + 7, [3]]), make_request([DOG, COW + 14, [4]]))

    def test_a_request_that_needs_the_whole_cache_gets_it(self):
        engine = make_engine(encoder_cache_bytes=7 * EMBED_BYTES, max_num_batched_tokens=6, max_num_seqs=4)
        run(engine, *(make_request([[index], CAT, DOG, COW, GRID]) for index in range(4)))

    def test_what_was_evicted_before_it_was_used_is_asked_for_again(self):
        engine = make_engine(encoder_cache_bytes=7 * EMBED_BYTES, max_num_batched_tokens=6, max_num_seqs=2)
        run(engine, make_request([DOG]))
        request = make_request([TEXT, CAT, TEXT, DOG])
        engine.add_request(request)
        assert [item.key for item in supply(engine, [request])] == [request.mm_features[0].key]
        run(engine, request, add=False)
        assert engine.runner.encoded == [DOG, CAT, DOG]
        assert engine.stats().preemptions == 1
        assert engine.stats().encoder_cache_queries == 2

    def test_what_is_computed_in_part_stays(self):
        engine = make_engine(encoder_cache_bytes=10 * EMBED_BYTES, long_prefill_token_threshold=2)
        # The first comes to its picture when the second is in the middle of one.
        run(engine, make_request([TEXT[:4], COW]), make_request([[3], CAT, TEXT]))
        assert engine.runner.encoded == [CAT, COW]
        assert engine.stats().preemptions == 0

    def test_who_gives_way_need_not_have_been_scheduled(self):
        engine = make_engine(
            6,
            encoder_cache_bytes=7 * EMBED_BYTES,
            max_num_seqs=3,
            max_num_batched_tokens=6,
            long_prefill_token_threshold=2,
            scheduling_policy="priority",
            reserve_full_sequence=False,
        )
        least = make_request([TEXT, CAT], priority=1)
        engine.add_request(least)
        supply(engine, [least])
        engine.step()
        others = [make_request([[3], DOG, TEXT[:3]]), make_request([TEXT[5:]])]
        for request in others:
            engine.add_request(request)
        # In the fourth step the first one finds no room in the encoder cache, and then the last one no block.
        run(engine, least, *others, add=False)
        assert engine.runner.steps[:4] == [6, 6, 6, 3]
        assert engine.stats().preemptions > 0

    def test_who_waits_for_room_is_not_passed_by_those_behind_it(self):
        engine = make_engine(
            encoder_cache_bytes=8 * EMBED_BYTES,
            max_num_batched_tokens=4,
            max_num_seqs=2,
            long_prefill_token_threshold=2,
        )
        # The second one has always a picture of 4 tokens in part, and room for the next one; the first one needs 7.
        small = [10, 17, 31, 38, 52, 59]
        run(engine, make_request([TEXT, CAT]), make_request([[3], *small]))
        assert engine.runner.encoded.index(CAT) < 5


class TestInputsRoom:
    def test_no_more_is_asked_for_than_may_be_held(self):
        engine = make_engine(max_feature_input_bytes=2 * 7 * 8, max_num_seqs=1)
        requests = [make_request([[index], CAT + 21 * index], max_tokens=1) for index in range(4)]
        for request in requests:
            engine.add_request(request)
        assert len(supply(engine, requests)) == 2
        most_bytes = 0
        while engine.has_unfinished_requests():
            engine.step()
            supply(engine, requests)
            most_bytes = max(most_bytes, engine.stats().feature_input_bytes)
        assert most_bytes == 2 * 7 * 8
        assert_nothing_is_left(engine)

    def test_a_long_queue_is_asked_for_piece_by_piece_so_that_no_piece_comes_late(self):
        # Frontends make one picture after the other; a second each here, and a request of 80 pictures among them.
        engine = make_engine(192, max_num_seqs=2, feature_timeout_s=1.5 * MAX_ASKED)
        long_prompt = [[1], *(7000 + 21 * index for index in range(80))]
        requests = [make_request([[2 + index], CAT + 21 * index], max_tokens=1) for index in range(150)]
        requests.insert(100, make_request(long_prompt, max_tokens=1))
        features = features_by_key(requests)
        for request in requests:
            engine.add_request(request)
        asked: list[WantedFeature] = []
        most_asked = []
        while engine.has_unfinished_requests():
            engine.step()
            asked += engine.take_wanted()
            most_asked.append(len(asked))
            if asked:
                engine.clock.now_s += 1
                wanted = asked.pop(0)
                engine.supply_feature(wanted.request_id, wanted.key, inputs_of(features[wanted.key]))
            outputs = engine.step().outputs
            assert all(output.error is None for output in outputs)
        assert sorted(set(most_asked))[-1] == 80 and most_asked[0] == MAX_ASKED
        assert_nothing_is_left(engine)

    def test_a_request_larger_than_the_bound_is_served_alone(self):
        engine = make_engine(max_feature_input_bytes=8)
        run(engine, *(make_request([[index], CAT + 21 * index, DOG]) for index in range(3)))

    def test_who_waits_for_room_holds_nothing(self):
        engine = make_engine(max_feature_input_bytes=14 * 8, encoder_cache_bytes=7 * EMBED_BYTES, max_num_seqs=2)
        run(engine, *(make_request([[index], CAT, DOG + 21 * index, COW]) for index in range(6)))

    def test_who_needs_more_than_there_is_room_for_is_not_passed_by_those_who_need_less(self):
        engine = make_engine(max_feature_input_bytes=2 * 7 * 8)
        requests = [make_request(parts) for parts in ([CAT], [[3], DOG, CAT + 42], [[4], CAT + 84])]
        for request in requests:
            engine.add_request(request)
            engine.step()
        assert [item.request_id for item in supply(engine, requests)] == [requests[0].request_id]
        for _ in range(2):  # one encodes it, the next one finds room
            engine.step()
        assert [item.request_id for item in supply(engine, requests)] == [requests[1].request_id] * 2
        engine.abort_requests(request.request_id for request in requests)
        engine.take_wanted()
        assert_nothing_is_left(engine)

    def test_inputs_are_held_until_their_picture_is_encoded_or_found(self):
        engine = make_engine(max_num_seqs=2)
        requests = [make_request([TEXT, CAT, TEXT], max_tokens=20) for _ in range(2)]
        for request in requests:
            engine.add_request(request)
        supply(engine, requests)
        assert engine.stats().feature_input_bytes == 7 * 8
        engine.step()
        assert (engine.stats().num_running, engine.stats().feature_input_bytes) == (2, 0)
        engine.abort_requests(request.request_id for request in requests)
        assert_nothing_is_left(engine)

    def test_text_goes_on_while_inputs_are_awaited(self):
        engine = make_engine(max_num_seqs=1)
        picture, text = make_request([CAT]), make_request([TEXT])
        engine.add_request(picture)
        engine.add_request(text)
        outputs = [engine.step().outputs for _ in range(3)]
        assert tokens_of(list(itertools.chain(*outputs))) == expected_output(TEXT, 3, VOCAB)
        assert not engine.has_work_now() and engine.has_unfinished_requests()
        assert (engine.stats().num_running, engine.stats().num_waiting) == (0, 1)
        run(engine, picture, add=False)

    def test_who_waits_aside_counts_for_the_queues_limits(self):
        engine = make_engine(max_num_seqs=1, max_num_queued_requests=1)
        engine.add_request(make_request([CAT], request_id="a"))
        engine.add_request(make_request([DOG], request_id="b"))
        engine.step()
        with pytest.raises(Exception, match="2 requests would wait, at most 1 may"):
            engine.add_request(make_request([TEXT]))
        engine.abort_requests(["a", "b"])
        assert_nothing_is_left(engine)


class TestWhatGoesWrong:
    def failing(self, engine: EngineCore, request: EngineRequest, *others: EngineRequest) -> RequestError:
        """Run all; the first one fails, and alone."""
        outputs = run(engine, request, *others, add=False)
        last = outputs[request.request_id][-1]
        assert last.finish_reason == "error" and last.ends_request
        assert all(outputs[other.request_id][-1].finish_reason == "length" for other in others)
        assert last.error is not None
        return last.error

    def start(self, engine: EngineCore, *requests: EngineRequest) -> None:
        for request in requests:
            engine.add_request(request)

    def test_a_supplier_may_say_why_there_is_nothing(self):
        engine = make_engine()
        request, other = make_request([TEXT, CAT]), make_request([[3], CAT])
        self.start(engine, request, other)
        reason = RequestError("invalid", "a broken picture", "messages[0].content[1]")
        [wanted] = engine.take_wanted()
        engine.supply_feature(wanted.request_id, wanted.key, {}, reason)
        assert self.failing(engine, request, other) == reason
        assert engine.runner.encoded == [CAT], "asked of the other one then"

    def test_inputs_larger_than_declared_end_the_request(self):
        engine, request = make_engine(), make_request([TEXT, CAT])
        self.start(engine, request)
        inputs = inputs_of(request.mm_features[0])
        engine.supply_feature(request.request_id, request.mm_features[0].key, inputs | {"more": inputs["pixels"]})
        assert "inputs have 112 bytes, 56 were declared" in self.failing(engine, request).message

    def test_inputs_that_are_not_the_features_are_the_callers_fault(self):
        engine, request = make_engine(), make_request([TEXT, DOT, CAT, TEXT], sampling={"n": 2})
        other = make_request([[3], CAT])
        self.start(engine, request, other)
        dot = inputs_of(request.mm_features[0])
        for wanted in engine.take_wanted():
            engine.supply_feature(wanted.request_id, wanted.key, {"pixels": dot["pixels"]})
        error = self.failing(engine, request, other)
        assert (error.code, error.param) == ("invalid", "mm_features[1]")
        assert error.message == "mm_features[1]: no pixels for 7 rows"

    def test_an_encoder_that_fails_ends_that_request_alone(self):
        engine = make_engine(max_num_batched_tokens=12)
        request, others = make_request([TEXT, CAT, TEXT]), [make_request([TEXT, DOG]), make_request([TEXT])]
        engine.runner.encoder_fails[request.mm_features[0].key] = RuntimeError("out of memory")
        self.start(engine, request, *others)
        error = self.failing(engine, request, *others)
        assert (error.code, error.param) == ("internal", None)
        assert "mm_features[0]: the encoder failed: RuntimeError: out of memory" in error.message

    def test_inputs_that_do_not_come_end_the_request_after_a_while(self):
        engine = make_engine(feature_timeout_s=5)
        request, other = make_request([TEXT, CAT]), make_request([[3], CAT])
        self.start(engine, request, other)
        engine.take_wanted()
        engine.step()
        engine.clock.now_s = 4.9
        assert not engine.has_work_now()
        engine.clock.now_s = 5
        assert engine.has_work_now()
        error = self.failing(engine, request, other)
        assert error.message == "mm_features[0]: its inputs did not come within 5 s (feature_timeout_s)"

    def test_the_time_for_an_answer_begins_when_its_question_leaves(self):
        # Room for one picture's inputs: the second is asked for in the step that encodes the first, a slow one.
        engine = make_engine(feature_timeout_s=5, max_feature_input_bytes=7 * 8)
        first, second = make_request([TEXT, CAT], max_tokens=9), make_request([[3], DOG])
        self.start(engine, first, second)
        supply(engine, [first])
        execute = engine.runner.execute

        def slow(batch: Sequence[ScheduledRequest]) -> StepResult:
            engine.clock.now_s += 10
            return execute(batch)

        engine.runner.execute = slow
        engine.step()
        engine.runner.execute = execute
        (wanted,) = engine.take_wanted()
        assert wanted.request_id == second.request_id
        assert [output.error for output in engine.step().outputs] == [None]
        engine.supply_feature(wanted.request_id, wanted.key, inputs_of(second.mm_features[0]))
        run(engine, second, add=False)

    def test_what_nobody_waits_for_is_dropped(self):
        engine, request = make_engine(), make_request([TEXT, CAT])
        self.start(engine, request)
        key, inputs = request.mm_features[0].key, inputs_of(request.mm_features[0])
        engine.supply_feature("somebody else", key, inputs)
        engine.supply_feature(request.request_id, b"another key", inputs)
        assert not engine._features.inputs.has_all(engine._scheduler.requests[request.request_id])
        engine.supply_feature(request.request_id, key, inputs)
        engine.supply_feature(request.request_id, key, {}, RequestError("internal", "too late"))
        run(engine, request, add=False)
        engine.supply_feature(request.request_id, key, inputs)
        assert_nothing_is_left(engine)

    def test_a_failed_step_leaves_nothing_pinned(self):
        engine = make_engine(max_num_batched_tokens=12)
        request = make_request([TEXT, CAT, TEXT])
        self.start(engine, request)
        supply(engine, [request])
        engine.runner.fail_next = True
        assert engine.step().outputs[0].finish_reason == "error"
        assert_nothing_is_left(engine)
        run(engine, make_request([TEXT, CAT, TEXT]))

    def test_a_request_aborted_and_added_again_is_not_taken_for_the_one_that_failed(self):
        engine, request = make_engine(), make_request([TEXT, CAT])
        self.start(engine, request)
        engine.take_wanted()
        engine.supply_feature(request.request_id, request.mm_features[0].key, {}, RequestError("internal", "no"))
        engine.abort_requests([request.request_id])
        assert run(engine, request)[request.request_id][-1].finish_reason == "length"

    @pytest.mark.parametrize("num_steps", range(6))
    def test_aborted_in_any_state_nothing_is_left(self, num_steps: int):
        engine = make_engine(max_num_batched_tokens=8)
        request = make_request([TEXT, CAT, DOG], sampling={"n": 2})
        self.start(engine, request)
        for step in range(num_steps):
            if step:
                supply(engine, [request])
            engine.step()
        engine.abort_requests([request.request_id])
        assert not engine.has_unfinished_requests()
        engine.take_wanted()
        assert_nothing_is_left(engine)

    def test_who_lies_about_a_keys_rows_breaks_nobodys_step(self):
        engine = make_engine()
        run(engine, make_request([TEXT, CAT]))
        liar = make_request([TEXT, COW])
        feature = liar.mm_features[0]
        key = feature_at(0, CAT).key
        liar = make_request(
            [TEXT, COW], mm_features=(type(feature)(key, feature.start, 6, ((0, 6),), 48),), max_tokens=1
        )
        other = make_request([[3], CAT])
        self.start(engine, liar, other)
        for item in engine.take_wanted():
            engine.supply_feature(item.request_id, item.key, {"pixels": inputs_of(feature)["pixels"][:3]})
        assert "no pixels for 6 rows" in self.failing(engine, liar, other).message


class TestRefused:
    def refusal(self, engine: EngineCore, request: EngineRequest, **options) -> InvalidRequestError:
        with pytest.raises(InvalidRequestError) as caught:
            engine.add_request(request, **options)
        assert_nothing_is_left(engine)
        return caught.value

    def test_a_model_of_text_takes_no_pictures(self):
        engine = EngineCore(EngineConfig(block_size=B), CheckingRunner(32, B, vocab_size=VOCAB))
        with pytest.raises(InvalidRequestError, match="mm_features: the model checking takes no pictures") as caught:
            engine.add_request(make_request([CAT]))
        assert caught.value.param == "mm_features"

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"start": 20}, r"mm_features\[0\] is at tokens \[20, 27\); it must .* end within the prompt's 17 tokens"),
            ({"start": -1}, r"mm_features\[0\] is at tokens \[-1, 6\); it must begin at 0 or later"),
            ({"embed_ranges": ()}, r"mm_features\[0\].embed_ranges: the first and the last of its 7 tokens"),
            ({"embed_ranges": ((0, 6),)}, "the first and the last"),
            ({"embed_ranges": ((1, 7),)}, "the first and the last"),
            ({"embed_ranges": ((0, 8),)}, "the first and the last"),
            ({"embed_ranges": ((0, 4), (3, 7))}, r"\[3, 7\) is empty or begins before 4"),
            ({"embed_ranges": ((0, 4), (4, 4), (5, 7))}, r"\[4, 4\) is empty"),
            ({"key": b"short"}, r"mm_features\[0\].key: must have 16 … 64 bytes, has 5"),
            ({"key": b"x" * 65}, "has 65"),
            ({"num_input_bytes": 0}, r"mm_features\[0\].num_input_bytes: must be in 1 … \d+, is 0"),
            ({"layout": {"grid": (1, -4)}}, r"layout\['grid'\]: must be in 0 … \d+, is \(1, -4\)"),
            ({"layout": {"grid": (1,) * 65}}, "'grid' has 4 and 65"),
            ({"layout": {"g" * 65: (1,)}}, "has 65 and 1"),
            ({"layout": {str(number): () for number in range(17)}}, "has 17 names, at most 16"),
            ({"modality": "video"}, r"mm_features\[0\].modality: must be 'image', is 'video'"),
        ],
    )
    def test_a_wrong_description_names_its_field(self, change: dict, message: str):
        request = make_request([TEXT, CAT])
        fields = {name: getattr(request.mm_features[0], name) for name in request.mm_features[0].__struct_fields__}
        feature = type(request.mm_features[0])(**fields | change)
        with pytest.raises(InvalidRequestError, match=message):
            make_engine().add_request(make_request([TEXT, CAT], mm_features=(feature,)))

    def test_features_stand_in_order_and_not_over_each_other(self):
        first, second = make_request([CAT, DOG]).mm_features
        for features in ((second, first), (first, first)):
            refusal = self.refusal(make_engine(), make_request([CAT, DOG], mm_features=features))
            assert "mm_features[1] is at tokens [0, 7); it must begin at" in str(refusal)

    @pytest.mark.parametrize(
        ("change", "difference"),
        [
            ({}, "num_embeds is 7, here 6"),
            ({"num_tokens": 7, "embed_ranges": ((0, 7),)}, "num_input_bytes is 56, here 48"),
            (
                {"num_tokens": 7, "embed_ranges": ((0, 7),), "num_input_bytes": 56, "layout": {"grid": (1,)}},
                r"layout is {}, here {'grid': \(1,\)}",
            ),
        ],
    )
    def test_what_has_one_key_has_one_description(self, change: dict, difference: str):
        # The first one's inputs would be used up when the second one, in the same step, has to be encoded of them.
        request = make_request([CAT, TEXT, COW, TEXT])
        cat, cow = request.mm_features
        claimed = msgspec.structs.replace(cow, key=cat.key, **change)
        request = msgspec.structs.replace(request, mm_features=(cat, claimed))
        with pytest.raises(InvalidRequestError, match=rf"mm_features\[1\].key: is that of \[0\], whose {difference}"):
            make_engine().add_request(request)

    @pytest.mark.parametrize("span", [(10, 16), (11, 17), (12, None)])
    def test_every_picture_needs_a_span_over_it(self, span: tuple[int, int | None]):
        spans = (ExtraKeySpan(*span, "mm", "x"), ExtraKeySpan(0, None, "salt", "x"))
        refusal = self.refusal(make_engine(), make_request([TEXT, CAT], extra_key_spans=spans))
        assert str(refusal) == (
            "extra_key_spans: the picture at tokens [10, 17) needs a span of the kind 'mm' over [10, 17)"
        )

    def test_pictures_that_see_each_other_need_spans_over_all_of_them(self):
        refusal = self.refusal(make_engine(joins_touching=True), make_request([TEXT, CAT, DOG]))
        assert "needs a span of the kind 'mm' over [10, 24) (all pictures that touch)" in str(refusal)

    def test_what_could_never_fit_is_refused_with_the_numbers(self):
        engine = make_engine(joins_touching=True, max_num_batched_tokens=20, max_num_seqs=8)
        refusal = self.refusal(engine, make_request([CAT, DOG], joins_touching=True))
        assert "touch, so that their 14 tokens are computed in one step; at most 13 can be" in str(refusal)
        engine = make_engine(encoder_cache_bytes=48)
        refusal = self.refusal(engine, make_request([CAT]))
        assert "have 56 bytes when encoded, the encoder cache has 48 (encoder_cache_bytes)" in str(refusal)
        engine = make_engine(encoder_cache_bytes=60, joins_touching=True)
        assert "2 picture(s)" in str(self.refusal(engine, make_request([CAT, DOG], joins_touching=True)))
        run(engine, make_request([CAT, CAT], joins_touching=True), make_request([CAT, [3], DOG], joins_touching=True))

    def test_inputs_at_hand_belong_to_a_feature_and_are_as_large_as_it_says(self):
        request, engine = make_request([CAT]), make_engine()
        refusal = self.refusal(engine, request, inputs={b"x": {}})
        assert (str(refusal), refusal.param) == ("inputs: no feature has the key 78", "inputs")
        larger = {"pixels": inputs_of(request.mm_features[0])["pixels"].repeat(2)}
        refusal = self.refusal(engine, request, inputs={request.mm_features[0].key: larger})
        assert "have 112 bytes, 56 were declared" in str(refusal)

    @pytest.mark.parametrize(
        "settings",
        [
            {"encoder_cache_bytes": 0},
            {"max_num_encoder_tokens": 0},
            {"max_feature_input_bytes": 0},
            {"feature_timeout_s": 0},
            {"feature_timeout_s": float("nan")},
        ],
    )
    def test_impossible_settings_are_named(self, settings: dict):
        with pytest.raises(InvalidConfigError, match=next(iter(settings))):
            make_engine(**settings)
