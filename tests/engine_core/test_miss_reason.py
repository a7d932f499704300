"""`RequestOutput.cache.miss_reason`: why the prefix cache did no more for a request, seen from outside the engine."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from engine_core import EngineConfig, EngineCore, EngineRequest, ExtraKeySpan, SamplingParams
from engine_core.kv_cache.lost_blocks import LostBlocks
from ipc.vocabulary import RequestOutput
from tests.checking_runner import CheckingRunner

B = 4
_ids = itertools.count()


def make_engine(num_blocks: int = 64, windows: tuple[int | None, ...] = (None,), **config) -> EngineCore:
    return EngineCore(EngineConfig(block_size=B, **config), CheckingRunner(num_blocks, B, windows=windows))


def ask(
    engine: EngineCore,
    tokens: Sequence[int],
    *,
    salt: str | None = None,
    salt_at: int = 0,
    max_tokens: int = 1,
    read: bool = True,
    **sampling,
) -> list[RequestOutput]:
    """All outputs of a request that is alone in the engine."""
    spans = () if salt is None else (ExtraKeySpan(salt_at, salt_at + 1, "cache_salt", salt),)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **sampling)
    engine.add_request(
        EngineRequest(f"r{next(_ids)}", list(tokens), params, extra_key_spans=spans, read_prefix_cache=read)
    )
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step().outputs
    return outputs


def reason(engine: EngineCore, tokens: Sequence[int], **options) -> str:
    first, *others = ask(engine, tokens, **options)
    assert first.cache is not None and all(output.cache is None for output in others), "with the first token only"
    return first.cache.miss_reason


def prompt(first: int, num_tokens: int) -> list[int]:
    return list(range(first, first + num_tokens))


@pytest.mark.parametrize("num_tokens", [1, B - 1, B, 3 * B, 3 * B + 2])
def test_what_is_there_but_for_what_has_to_be_computed_is_no_miss(num_tokens: int):
    engine = make_engine()
    assert num_tokens == 1 or reason(engine, prompt(0, num_tokens)) == "not_found"
    assert reason(engine, prompt(0, num_tokens)) == "none"
    assert sum(engine.stats().prefix_cache_misses.values()) == (num_tokens > 1)


@pytest.mark.parametrize("end", [2 * B, 2 * B + 3])
def test_the_next_turn_goes_on_where_its_relative_ended(end: int):
    engine = make_engine()
    first = prompt(0, end)
    answer = [token for output in ask(engine, first, max_tokens=3) for token in output.new_token_ids]
    assert reason(engine, first + answer[:-1] + prompt(500, 9)) == "continued"


@pytest.mark.parametrize("place", [1, B - 1, B, B + 1, 2 * B, 2 * B + 2])
@pytest.mark.parametrize("match_unit", ["token", "block"])
def test_a_relative_that_goes_on_differently_diverged_wherever_it_did(place: int, match_unit: str):
    engine = make_engine(prefix_match_unit=match_unit)
    ask(engine, prompt(0, 4 * B))
    assert reason(engine, prompt(0, place) + prompt(500, 10)) == "diverged"


def test_what_begins_like_nothing_is_not_found():
    engine = make_engine()
    ask(engine, prompt(0, 4 * B))
    assert reason(engine, prompt(500, 10)) == "not_found"


def test_what_gave_way_was_evicted_also_where_what_follows_is_still_there():
    engine = make_engine(num_blocks=8)
    ask(engine, prompt(0, 5 * B))
    ask(engine, prompt(500, 6 * B))
    assert reason(engine, prompt(0, 5 * B)) == "evicted"
    assert engine.stats().prefix_cache_misses["evicted"] == 1


def test_who_comes_after_a_reset_hears_of_it():
    engine = make_engine()
    ask(engine, prompt(0, 3 * B))
    engine.reset_prefix_cache()
    assert reason(engine, prompt(0, 5 * B)) == "reset"
    assert reason(engine, prompt(0, 5 * B)) == "none"


def test_of_a_begun_block_nothing_is_found_where_whole_blocks_are_wanted():
    engine = make_engine(prefix_match_unit="block")
    ask(engine, prompt(0, 4 * B))
    assert reason(engine, prompt(0, 2 * B + 3)) == "block_boundary"


def test_who_does_not_read_is_told_so():
    engine = make_engine()
    ask(engine, prompt(0, 3 * B))
    assert reason(engine, prompt(0, 3 * B), read=False) == "read_disabled"
    assert reason(engine, prompt(0, 3 * B), prompt_logprobs=0) == "read_disabled"
    assert reason(make_engine(enable_prefix_caching=False), prompt(0, 3 * B)) == "cache_disabled"


def test_a_window_whose_blocks_were_taken_evicted_them():
    engine = make_engine(num_blocks=24, windows=(None, 6))
    ask(engine, prompt(0, 5 * B))
    ask(engine, prompt(500, 8 * B))
    assert reason(engine, prompt(0, 5 * B)) == "evicted"


def test_nobody_hears_of_relatives_under_another_salt():
    engine = make_engine()
    for salt in ("a", None):
        ask(engine, prompt(0, 3 * B) + prompt(100, 9), salt=salt)
    assert reason(engine, prompt(0, 3 * B) + prompt(200, 9), salt="b") == "not_found"
    engine.reset_prefix_cache()
    assert reason(engine, prompt(0, 3 * B), salt="c") == "not_found", "nor that they were forgotten"


@pytest.mark.parametrize("salt_at", [2 * B, 2 * B + 1, 3 * B - 1])
@pytest.mark.parametrize("mine", ["b", None])
def test_where_a_salt_begins_others_under_it_do_not_exist(salt_at: int, mine: str | None):
    alone, beside = make_engine(), make_engine()
    shared = prompt(0, salt_at)
    for engine in (alone, beside):
        ask(engine, shared)
    for salt in ("a", "c"):
        ask(beside, shared + prompt(100, 9), salt=salt, salt_at=salt_at)
    asked = shared + prompt(200, 9)
    assert reason(beside, asked, salt=mine, salt_at=salt_at) == reason(alone, asked, salt=mine, salt_at=salt_at)
    assert reason(beside, shared + prompt(300, 9), salt=mine, salt_at=salt_at) in ("diverged", "continued")


def test_the_holder_of_a_salt_hears_of_relatives_under_it():
    engine = make_engine()
    ask(engine, prompt(0, 3 * B), salt="a")
    assert reason(engine, prompt(0, 2 * B + 1) + prompt(500, 5), salt="a") == "diverged"
    assert reason(engine, prompt(0, 3 * B), salt="a") == "none"


def test_a_prompt_with_several_continuations_is_counted_once():
    engine = make_engine()
    outputs = ask(engine, prompt(0, 3 * B), n=3, max_tokens=4)
    assert [output.cache.miss_reason for output in outputs if output.cache] == ["not_found"]
    stats = engine.stats()
    assert stats.prefix_cache_misses["not_found"] == 1
    assert stats.prefix_cache_missed_tokens["not_found"] == 3 * B


def test_missed_tokens_and_hits_are_all_that_was_asked_for():
    engine = make_engine(num_blocks=12)
    for number in range(40):
        ask(engine, prompt(100 * (number % 4), 5 + number % 3 * B), max_tokens=1 + number % 6)
    stats = engine.stats()
    missed = sum(stats.prefix_cache_missed_tokens.values())
    whole = stats.prefix_cache_queries - stats.prefix_cache_hits - missed
    assert whole == 40 - sum(stats.prefix_cache_misses.values()), "what was found whole lacks one token"


def test_lost_blocks_are_remembered_within_bounds_the_latest_reason_counting():
    lost = LostBlocks(100)
    names = [number.to_bytes(4, "big") for number in range(1000)]
    for name in names:
        noted, loss = lost.begin(1, "evicted")
        noted[name] = loss
        assert len(lost) <= 100
    assert all(lost.find(name) for name in names[-50:])
    assert lost.find(names[10]) is None
    noted, loss = lost.begin(1, "reset")
    noted[names[-1]] = loss
    assert lost.find(names[-1]) is loss and loss.why == "reset"
