"""`EngineCore.probe` and `explain`: what a request would find, and where its longest cached relative parts from it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from engine_core import EngineConfig, EngineCore, EngineRequest, ExtraKeySpan, InvalidRequestError, SamplingParams
from ipc.vocabulary import CacheExplanation, CacheProbe, KeepPrefix
from tests.checking_runner import CheckingRunner
from tests.engine_core.told_causes import Computed, check_truth

B = 4
_ids = itertools.count()


def make_engine(num_blocks: int = 64, windows: tuple[int | None, ...] = (None,), **config) -> EngineCore:
    return EngineCore(EngineConfig(block_size=B, **config), CheckingRunner(num_blocks, B, windows=windows))


def make(
    tokens: Sequence[int], *, salts: Sequence[tuple[int, str]] = (), max_tokens: int = 1, spans=(), **fields
) -> EngineRequest:
    """`salts`: from which token on, and which."""
    salt_spans = tuple(ExtraKeySpan(at, at + 1, "cache_salt", salt) for at, salt in salts)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(f"r{next(_ids)}", list(tokens), params, extra_key_spans=(*salt_spans, *spans), **fields)


def run(engine: EngineCore, request: EngineRequest) -> list[int]:
    """Computes the request; the tokens that steps have computed of it."""
    engine.add_request(request)
    tokens = list(request.prompt_token_ids)
    while engine.has_unfinished_requests():
        for output in engine.step().outputs:
            tokens += output.new_token_ids
    return tokens[:-1]


def prompt(first: int, num_tokens: int) -> list[int]:
    return list(range(first, first + num_tokens))


def explain(engine: EngineCore, request: EngineRequest, **options) -> tuple[CacheProbe, CacheExplanation]:
    probe = engine.explain(request, **options)
    assert probe.explanation is not None
    return probe, probe.explanation


@pytest.mark.parametrize("unit", ["token", "block"])
def test_whatever_others_have_under_their_salts_the_same_is_told(unit: str):
    """They stand beside the own relative wherever that is looked for."""
    told = set()
    for seed in range(5):
        engine = make_engine(256, prefix_match_unit=unit)
        run(engine, make([1, 2, 30, 4], salts=[(2, "mine")]))
        rng = random.Random(seed)
        for _ in range(40):
            run(engine, make([1, 2, rng.randrange(60), 4], salts=[(2, f"theirs {rng.random()}")]))
        for token in (10, 29, 31, 50):
            asked = make([1, 2, token, 4, 5], salts=[(2, "mine")])
            probe, explanation = explain(engine, asked)
            told.add((probe.miss_reason, explanation.token_index, tuple(explanation.relative_token_ids)))
            assert engine.probe(asked).miss_reason == probe.miss_reason
    assert told == {("diverged", 2, (30, 4))}


def state_of(engine: EngineCore) -> tuple:
    pool = engine._scheduler.kv.pool
    blocks = [(block.ref_cnt, block.node, block.is_filled) for block in pool.blocks]
    return [block.block_id for block in pool.free_queue], blocks, engine.stats()


@pytest.mark.parametrize("policy", ["lru", "frequency"])
def test_a_probe_foretells_the_hit_and_changes_nothing(policy: str):
    engine = make_engine(num_blocks=24, eviction_policy=policy)
    numbers = random.Random(1)
    for _ in range(60):
        tokens = prompt(100 * numbers.randrange(4), numbers.randint(1, 20)) + prompt(900, numbers.randint(0, 5))
        request = make(tokens, max_tokens=numbers.randint(1, 6))
        before = state_of(engine)
        probe = engine.probe(request)
        explained = engine.explain(request)
        assert state_of(engine) == before
        assert explained.explanation is not None and explained.num_hit_tokens == probe.num_hit_tokens
        stats = engine.stats()
        engine.add_request(request)
        first = engine.step().outputs[0]
        assert first.num_cached_tokens == probe.num_hit_tokens == probe.tier_tokens["device"]
        assert first.cache is not None and first.cache.miss_reason == probe.miss_reason == explained.miss_reason
        assert engine.stats().prefix_cache_copied - stats.prefix_cache_copied == probe.num_copied_tokens
        while engine.has_unfinished_requests():
            engine.step()


def test_a_probe_tells_how_much_of_the_hit_is_kept():
    engine = make_engine()
    run(engine, make(prompt(0, 5 * B), keep=(KeepPrefix(2 * B + 1, ttl_s=60.0),)))
    assert engine.probe(make(prompt(0, 6 * B))).num_kept_tokens == 3 * B
    assert engine.probe(make(prompt(0, 2 * B))).num_kept_tokens == 2 * B - 1
    assert engine.probe(make(prompt(1, 6 * B))).num_kept_tokens == 0


def test_what_can_never_run_is_not_probed():
    with pytest.raises(InvalidRequestError, match="600 tokens"):
        make_engine().probe(make(prompt(0, 600)))


@pytest.mark.parametrize("place", range(1, 3 * B))
def test_the_relative_is_shown_from_where_it_goes_on_differently(place: int):
    engine = make_engine()
    computed = run(engine, make(prompt(0, 5 * B), max_tokens=7))
    probe, found = explain(engine, make(prompt(0, place) + prompt(500, 9)))
    assert (probe.miss_reason, found.token_index, found.differing_kind) == ("diverged", place, None)
    assert found.relative_token_ids == computed[place : place + 24]
    _, found = explain(engine, make(prompt(0, place) + prompt(500, 9)), relative_end=place + 3)
    assert found.relative_token_ids == computed[place : place + 24], "a few in any case"


def test_as_much_of_the_relative_is_shown_as_is_wanted():
    engine = make_engine()
    computed = run(engine, make(prompt(0, 40 * B)))
    assert len(computed) == 40 * B
    _, found = explain(engine, make([0, 1, 777, 778]), relative_end=30 * B + 1)
    assert found.relative_token_ids == computed[2 : 30 * B + 1]


def test_where_the_relative_ended_there_is_nothing_to_show():
    engine = make_engine()
    computed = run(engine, make(prompt(0, 2 * B + 1)))
    probe, found = explain(engine, make([*computed, 5, 6, 7, 8, 9]))
    assert (probe.miss_reason, found.token_index, found.relative_token_ids) == ("continued", len(computed), [])


def test_what_was_evicted_is_told_with_its_time():
    engine = make_engine(num_blocks=8)
    run(engine, make(prompt(0, 5 * B)))
    run(engine, make(prompt(500, 6 * B)))
    probe, found = explain(engine, make(prompt(0, 5 * B)))
    assert probe.miss_reason == "evicted" and found.token_index == probe.num_hit_tokens
    assert found.lost_since_s is not None
    engine.reset_prefix_cache()
    probe, later = explain(engine, make(prompt(500, 6 * B)))
    assert probe.miss_reason == "reset"
    assert later.lost_since_s is not None and later.lost_since_s >= found.lost_since_s


@pytest.mark.parametrize("start", [0, B, B + 2])
@pytest.mark.parametrize("kind", ["lora", "mm"])
def test_a_key_that_differs_where_the_tokens_do_not_is_told_by_its_kind(start: int, kind: str):
    engine = make_engine()

    def spans(key: str) -> tuple[ExtraKeySpan, ...]:
        return (ExtraKeySpan(start, None if kind == "lora" else start + B, kind, key),)

    for other in range(20):
        run(engine, make([*prompt(0, start), *prompt(500 + other, 9)]))
    run(engine, make(prompt(0, 4 * B), spans=spans("a")))
    probe, found = explain(engine, make(prompt(0, 4 * B), spans=spans("b")))
    assert (found.token_index, found.differing_kind) == (start, kind) or start == 0
    assert probe.num_hit_tokens == start
    _, found = explain(engine, make(prompt(0, start) + prompt(900, 9)))
    assert found.differing_kind is None


def test_a_running_request_is_a_relative_as_far_as_it_is():
    engine = make_engine()
    engine.add_request(make(prompt(0, B + 3), max_tokens=50))
    engine.step()
    probe, found = explain(engine, make([*prompt(0, B + 2), 700, 701]))
    assert (probe.miss_reason, found.token_index) == ("diverged", B + 2)
    assert found.relative_token_ids[:1] == [B + 2]


@pytest.mark.parametrize("place", [1, B, B + 1, 2 * B, 2 * B + 1])
@pytest.mark.parametrize("mine", [(), ((2 * B + 2, "mine"),)])
def test_a_relative_is_shown_as_far_as_no_foreign_salt_covers_it(place: int, mine: tuple):
    engine = make_engine()
    salt_at = 2 * B + 2
    for salt in ("a", "b"):
        run(engine, make(prompt(0, 5 * B), salts=[(salt_at, salt)]))
    probe, found = explain(engine, make(prompt(0, place) + prompt(500, 3 * B), salts=mine))
    assert (probe.miss_reason, found.token_index) == ("diverged", place)
    assert found.relative_token_ids == prompt(place, salt_at - place)
    _, found = explain(engine, make(prompt(0, place) + prompt(500, 3 * B), salts=[(salt_at, "a")]))
    assert found.relative_token_ids[: salt_at - place] == prompt(place, salt_at - place)


@pytest.mark.parametrize("num_blocks", [24, 3000])
@pytest.mark.parametrize("match_unit", ["token", "block"])
def test_every_cause_is_true_and_nothing_under_another_salt_is_shown(num_blocks: int, match_unit: str):
    """Beside a reference that compares with the tokens of all requests before, one by one."""
    numbers = random.Random(num_blocks)
    engine = make_engine(num_blocks, prefix_match_unit=match_unit)
    before: list[Computed] = []
    seen: dict[str, int] = {}
    for _ in range(300):
        salt = numbers.choice(["a", "b", None])
        length = numbers.randint(0, 14)
        # What is private is made of words of its own.
        private = {"a": 300, "b": 600, None: 0}[salt]
        shared = prompt(10 * numbers.randrange(3), length)
        own = [private + numbers.randrange(3) for _ in range(numbers.randint(1, 12))]
        salts = () if salt is None else ((0 if numbers.random() < 0.4 else length, salt),)
        request = make(shared + own, salts=salts, max_tokens=numbers.randint(1, 8))
        probe = engine.explain(request)
        check_truth(engine, request, salts, probe, before, evicts=num_blocks < 100)
        seen[probe.miss_reason] = seen.get(probe.miss_reason, 0) + 1
        computed = run(engine, request)
        # Of a block that is not full nothing is cached where whole ones are wanted.
        stored = len(computed) if match_unit == "token" else len(computed) // B * B
        before.append(Computed(computed[:stored], salts))
        if numbers.random() < 0.01 and num_blocks < 100:
            engine.reset_prefix_cache()
    assert {"diverged", "continued", "not_found"} <= seen.keys()
    assert ("evicted" in seen) == (num_blocks < 100)
