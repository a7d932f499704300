"""Hits that end within a block: what is copied, from where, and what becomes of it when somebody is in the way.

`slow_cache` watches the engines here: a hit that is longer or shorter than it can be fails by itself.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from engine_core import EngineConfig, EngineCore, EngineRequest, SamplingParams
from engine_core.kv_cache import KVCacheManager
from engine_core.kv_cache.block_content import partial_content
from ipc.vocabulary import ExtraKeySpan
from tests.checking_runner import expected_output
from tests.engine_core.slow_cache import SlowCache, WatchedRunner, watch
from tests.engine_core.test_engine import assert_idle
from tests.engine_core.test_manager import admit, append, new_request
from tests.engine_core.test_step_cost import count_bytecodes

B = 4
VOCAB = 1000
SIX = list(range(10, 16))


def make_engine(num_blocks: int, **settings) -> tuple[EngineCore, SlowCache]:
    runner = WatchedRunner(num_blocks, settings.get("block_size", B), vocab_size=VOCAB)
    engine = EngineCore(EngineConfig(**{"block_size": B, "max_num_seqs": 4} | settings), runner)
    return engine, watch(engine)


def add(engine: EngineCore, request_id: str, prompt: Sequence[int], max_tokens: int = 1, **fields) -> None:
    engine.add_request(
        EngineRequest(request_id, list(prompt), SamplingParams(temperature=0.0, max_tokens=max_tokens), **fields)
    )


def run(engine: EngineCore) -> dict[str, int]:
    """Step until nothing is left, and see that outputs are right. Returns cached tokens by request."""
    prompts = {request.request_id: request.token_ids.copy() for request in engine._scheduler.requests.values()}
    produced: dict[str, list[int]] = {request_id: [] for request_id in prompts}
    cached = {}
    while engine.has_unfinished_requests():
        for output in engine.step().outputs:
            produced[output.request_id] += output.new_token_ids
            cached[output.request_id] = output.num_cached_tokens
    assert_idle(engine)
    for request_id, prompt in prompts.items():
        assert produced[request_id] == expected_output(prompt, len(produced[request_id]), VOCAB)
    return cached


def run_one(engine: EngineCore, request_id: str, prompt: Sequence[int], max_tokens: int = 1, **fields) -> int:
    add(engine, request_id, prompt, max_tokens, **fields)
    return run(engine)[request_id]


def blocks_of(engine: EngineCore, request_id: str) -> list[int]:
    return engine._scheduler.kv.tables[request_id].block_tables[0].copy()


def test_the_next_turn_goes_on_where_the_last_one_ended():
    engine, _ = make_engine(16)
    assert run_one(engine, "first", SIX, 5) == 0
    answered = SIX + expected_output(SIX, 5, VOCAB)
    # Nobody has computed the last token.
    assert run_one(engine, "next", [*answered, 7, 7]) == len(answered) - 1


def test_what_this_step_writes_is_not_copied_in_it():
    """Its whole blocks are shared."""
    engine, _ = make_engine(16, share_in_flight=False)
    add(engine, "first", SIX)
    add(engine, "second", [*SIX, 7])
    assert run(engine) == {"first": 0, "second": B}
    assert run_one(engine, "third", [*SIX, 8]) == len(SIX)


def test_a_block_that_is_copied_is_not_taken_in_the_same_step():
    engine, _ = make_engine(4)
    add(engine, "first", SIX)
    engine.step()
    source = 1
    assert [block.block_id for block in engine._scheduler.kv.pool.free_queue] == [2, 3, source, 0]
    add(engine, "copies", [*SIX, 7], 2)
    add(engine, "takes", range(20, 27), 2)
    engine.step()
    # Of what is free, one block is left.
    assert [request.request_id for request in engine._scheduler.running] == ["copies"]
    assert engine.runner.num_copies == 1
    engine.step()
    assert source in blocks_of(engine, "takes")
    assert run(engine) == {"takes": 0}


def test_without_room_for_its_source_a_copy_is_dropped_and_not_the_request():
    engine, cache = make_engine(2)
    run_one(engine, "first", SIX)
    assert run_one(engine, "second", [*SIX, 7]) == B
    assert cache.happened["dropped_partial_hits"] == 1 and engine.runner.num_copies == 0


def test_a_block_that_was_to_be_copied_to_is_given_to_another_in_the_same_step():
    manager = KVCacheManager(4, B)
    admit(manager, new_request("first", SIX))
    manager.free(manager.tables["first"].request)
    copying = new_request("copying", [*SIX, 7])
    hit = manager.get_computed_blocks(copying)
    assert hit.num_tokens == len(SIX) and hit.tail is not None
    manager.allocate_slots(copying, 1, hit)
    [copy] = manager.copies_for(copying)
    assert manager.pool.blocks[copy.source].ref_cnt == 1
    manager.withdraw(copying)
    assert not manager.copies_for(copying)
    assert all(block.ref_cnt == 0 for block in manager.pool.blocks)
    other = new_request("other", range(20, 36))
    manager.allocate_slots(other, 16, manager.get_computed_blocks(other))
    assert copy.target in manager.tables["other"].block_tables[0] and not manager.copies_for(other)


def test_an_abort_between_scheduling_and_copying_leaves_nothing_in_use():
    engine, _ = make_engine(8)
    run_one(engine, "first", SIX)
    add(engine, "aborted", [*SIX, 7, 8, 9], 5)
    step = engine._scheduler.schedule()
    assert step.copies
    engine.abort_requests(["aborted"])
    assert_idle(engine)
    engine.runner.copy_slots(step.copies)
    assert not engine._scheduler.update(step, engine.runner.launch(step.scheduled).wait())
    assert_idle(engine)
    # The step has run: what it computed is there.
    assert run_one(engine, "same", [*SIX, 7, 8, 9], 5) == 2 * B


def test_a_failed_step_leaves_nothing_of_its_copies():
    engine, _ = make_engine(8)
    run_one(engine, "first", SIX)
    add(engine, "fails", [*SIX, 7, 8, 9], 5)
    engine.runner.fail_next = True
    [output] = engine.step().outputs
    assert output.finish_reason == "error" and engine.runner.num_copies == 1
    assert_idle(engine)
    assert run_one(engine, "same", [*SIX, 7, 8, 9], 5) == len(SIX)


def test_what_could_not_be_copied_is_not_taken_for_copied(monkeypatch):
    engine, _ = make_engine(8)
    run_one(engine, "first", SIX)
    add(engine, "fails", [*SIX, 7, 8, 9], 5)
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "copy_slots", raise_it)
        [output] = engine.step().outputs
    assert output.finish_reason == "error"
    source, target = 1, 2
    assert [block.block_id for block in engine._scheduler.kv.pool.free_queue] == [4, 5, 6, 7, source, 3, target, 0]
    run_one(engine, "evicts the source", range(50, 70))
    assert run_one(engine, "same", [*SIX, 7, 8, 9]) == B


def raise_it(copies: object) -> None:
    raise RuntimeError("the device is on fire")


def test_half_a_chain_is_evicted_while_somebody_waits_for_a_seat():
    engine, _ = make_engine(6, max_num_seqs=1)
    prompt = range(10, 26)
    run_one(engine, "first", prompt)
    add(engine, "evicts", range(50, 62), 4)
    add(engine, "waits", [*prompt, 7])
    engine.step()
    assert blocks_of(engine, "evicts") == [4, 5, 3]
    # Its last token needs a fourth block, which was the third of the chain.
    assert run(engine) == {"evicts": 0, "waits": 2 * B}


def test_a_duplicate_is_copied_when_the_first_is_gone():
    engine, _ = make_engine(4)
    run_one(engine, "first", SIX)
    run_one(engine, "again", SIX, read_prefix_cache=False)
    run_one(engine, "evicts the first", range(50, 56))
    assert run_one(engine, "next", [*SIX, 7]) == len(SIX)


def test_a_duplicate_that_this_step_writes_is_not_copied_when_the_first_is_gone():
    manager = KVCacheManager(6, B)
    admit(manager, first := new_request("first", range(B)))
    manager.free(first)
    again = new_request("again", range(B))
    manager.allocate_slots(again, 2)
    manager.commit_step()
    again.num_computed_tokens = 2
    admit(manager, other := new_request("other", range(50, 66)))
    manager.free(other)
    manager.allocate_slots(again, 2)
    asks = new_request("asks", [*range(B - 1), 7])
    assert manager.get_computed_blocks(asks).num_tokens == B - 1
    assert manager.pool.blocks[0] in manager.allocate_slots(new_request("evicts", range(20, 24)), B)
    # What it wrote before is.
    assert manager.get_computed_blocks(asks).num_tokens == 2


def test_a_prefix_that_left_the_window_and_the_cache_is_the_same_when_it_is_computed_again():
    manager = KVCacheManager(6, B, windows=(4,))
    first = new_request("first", range(12))
    admit(manager, first)
    append(manager, first, 7)
    nodes = list(manager.tables["first"].nodes)
    evicts = new_request("evicts", range(50, 66))
    admit(manager, evicts)
    manager.free(evicts)
    assert [node.block(0) is None for node in nodes] == [True, True, False]
    again = new_request("again", range(9))
    assert admit(manager, again).num_tokens == 0
    assert all(one is other for one, other in zip(manager.tables["again"].nodes, nodes[:2], strict=True))
    assert [node.block(0) is None for node in nodes] == [False, False, False]


def mm(start: int, end: int, key: str = "cat") -> ExtraKeySpan:
    return ExtraKeySpan(start, end, "mm", key)


def own(start: int, end: int | None, key: str) -> ExtraKeySpan:
    return ExtraKeySpan(start, end, "of another frontend", key)


@pytest.mark.parametrize(
    ("cached", "asked", "num_tokens"),
    [
        ([mm(2, 6)], [mm(2, 6)], 7),
        ([mm(2, 6)], [mm(2, 6, "dog")], 2),
        ([mm(2, 6)], [mm(3, 6)], 2),
        ([mm(2, 6)], [], 2),
        ([mm(2, 6)], [mm(2, 6), ExtraKeySpan(5, 6, "cache_salt", "a")], 5),
        ([ExtraKeySpan(0, 1, "cache_salt", "a")], [ExtraKeySpan(0, 1, "cache_salt", "b")], 0),
        ([ExtraKeySpan(3, 4, "cache_salt", "a")], [ExtraKeySpan(3, 4, "cache_salt", "b")], 3),
        ([ExtraKeySpan(3, 4, "cache_salt", "a")], [ExtraKeySpan(5, 6, "cache_salt", "a")], 3),
        ([ExtraKeySpan(3, 4, "cache_salt", "a")], [], 3),
        ([ExtraKeySpan(0, None, "lora", "a")], [ExtraKeySpan(0, None, "lora", "a")], 7),
        ([ExtraKeySpan(0, None, "lora", "a")], [], 0),
        ([own(1, 4, "a")], [own(1, 5, "a")], 4),
        ([own(1, 4, "a"), own(1, 5, "b")], [own(1, 4, "a"), own(1, None, "b")], 5),
        ([own(1, 4, "a"), own(1, 5, "b")], [own(1, 3, "b"), own(1, 9, "a")], 3),
        ([own(1, 12, "a"), own(1, 13, "b")], [own(1, 13, "a"), own(1, 12, "b")], 7),
        ([own(1, 4, "a"), own(1, 5, "a")], [own(1, 5, "a")], 1),
        ([own(1, 4, "a"), own(1, 5, "a")], [own(1, 4, "a"), own(1, 6, "a")], 5),
    ],
)
def test_a_hit_goes_on_while_the_same_keys_cover_the_tokens(
    cached: list[ExtraKeySpan], asked: list[ExtraKeySpan], num_tokens: int
):
    """It may end within a picture, and crosses none that differs. What is left behind differs, or begins like it."""
    engine, _ = make_engine(16, block_size=8)
    prompt = range(10, 17)
    for number, token_id in enumerate((9, 10, 11)):
        run_one(engine, f"other {number}", [token_id, *range(30, 36)])
    run_one(engine, "cached", prompt, extra_key_spans=tuple(cached))
    # Another one's first token is the same.
    at_least = 0 if asked and asked[0].start == 0 else 1
    assert run_one(engine, "asked", [*prompt, 7, 8], extra_key_spans=tuple(asked)) == max(num_tokens, at_least)


def test_in_a_picture_a_hit_ends_where_the_tokens_differ():
    engine, _ = make_engine(16, block_size=8)
    run_one(engine, "cached", range(10, 17), extra_key_spans=(mm(2, 6),))
    assert run_one(engine, "asked", [10, 11, 12, 13, 7, 7], extra_key_spans=(mm(2, 6),)) == 4


def test_of_ten_thousand_ends_behind_one_system_prompt_a_lookup_looks_at_a_few():
    """What it does grows with the logarithm of their number."""
    few, many = lookup_cost(10), lookup_cost(10_000)
    assert few < many < 1.5 * few


def lookup_cost(num_ends: int) -> int:
    manager, rng = KVCacheManager(num_ends + 2, B), random.Random(1)
    system = new_request("system", range(B))
    admit(manager, system)
    [node] = manager.tables["system"].nodes
    for block in manager.pool.get_new_blocks(num_ends):
        end = [rng.randrange(50_000) for _ in range(B - 1)]
        manager.pool.tree.add_partial(node, partial_content(end, (), 0, len(end), B), [block])
    asked = new_request("asked", [*range(B), *end, 7])
    assert manager.get_computed_blocks(asked).num_tokens == 2 * B - 1
    return count_bytecodes(lambda: manager.get_computed_blocks(asked))
