"""The events of an engine: a table made of them alone is the engine's own, after every step."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any, get_args

import pytest

from engine_core import EngineConfig, EngineCore, EngineRequest, ExtraKeySpan, InvalidConfigError, SamplingParams
from engine_core.config import KVEventHashes, KVEventsConfig, SchedulingPolicy
from engine_core.kv_cache import KVCacheBlock
from engine_core.kv_cache.block_content import KeyedContent
from engine_core.kv_cache.token_bytes import token_id_bytes
from engine_core.kv_events.recorder import KVEventRecorder
from ipc.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventTable
from tests.checking_runner import CheckingRunner
from tests.engine_core.test_random_hits import HitsWorkload

ENABLED = KVEventsConfig(enable_kv_cache_events=True)


def make_engine(
    num_blocks: int = 32, windows: tuple[int | None, ...] = (None,), block_size: int = 4, **settings: Any
) -> EngineCore:
    runner = CheckingRunner(num_blocks, block_size, windows=windows)
    config = EngineConfig(block_size=block_size, kv_events_config=ENABLED, **settings)
    return EngineCore(config, runner)


def run(engine: EngineCore, request_id: str, prompt: list[int], *spans: ExtraKeySpan, max_tokens: int = 1) -> None:
    engine.add_request(EngineRequest(request_id, prompt, SamplingParams(0.0, max_tokens=max_tokens), spans))
    while engine.has_unfinished_requests():
        engine.step()


def number(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")


def own_table(engine: EngineCore) -> dict[bytes, tuple[bytes | None, bytes, set[int]]]:
    """Of each block that a step which has run has written: its parent, its tokens, and the groups that have it."""
    tree = engine._scheduler.kv.pool.tree
    table = {}
    for block_hash, blocks in tree.copies().items():
        if groups := {block.group for block in blocks if block.is_filled}:
            node = tree._nodes[block_hash]
            tokens = node.content.tokens if isinstance(node.content, KeyedContent) else node.content
            table[block_hash] = (node.parent.block_hash or None, tokens, groups)
    return table


def check_table(table: KVEventTable, engine: EngineCore) -> None:
    """Raises AssertionError unless `table`, of whole hashes, is the engine's."""
    names_groups = engine.runner.info.windows != (None,)
    made = {
        block_hash: (block.parent, token_id_bytes(block.token_ids), {group or 0 for _, group in block.copies})
        for block_hash, block in table.blocks.items()
    }
    assert made == own_table(engine)
    for block in table.blocks.values():
        # Nothing is told twice.
        assert set(block.copies.values()) == {1}
        assert all(medium == "GPU" and (group is None) != names_groups for medium, group in block.copies)


class EventsWorkload(HitsWorkload):
    """Random requests, aborts, preemptions, failed steps and resets, with a consumer that sees the events alone."""

    def __init__(self, rng: random.Random, policy: str) -> None:
        super().__init__(rng, policy)
        self.table = KVEventTable()
        self.happened: Counter[str] = Counter()

    def more_settings(self) -> dict[str, Any]:
        return super().more_settings() | {
            "kv_events_config": ENABLED,
            "kv_events_hashes": "bytes",
            "enable_prefix_caching": True,
        }

    def operations(self) -> dict[Callable[[], None], int]:
        return super().operations() | {self.reset: 3}

    def step(self) -> None:
        super().step()
        self.check_events()

    def check_queue(self) -> None:
        super().check_queue()
        self.check_events()

    def check_events(self) -> None:
        events = self.engine.take_kv_events()
        self.table.apply(events)
        self.happened.update(type(event).__name__ for event in events)
        self.happened["duplicates"] += any(len(held) > 1 for held in self.copies_by_group().values())
        check_table(self.table, self.engine)

    def copies_by_group(self) -> dict[tuple[bytes, int], list[object]]:
        copies: dict[tuple[bytes, int], list[object]] = {}
        for block_hash, blocks in self.engine._scheduler.kv.pool.tree.copies().items():
            for block in blocks:
                copies.setdefault((block_hash, block.group), []).append(block)
        return copies


@pytest.mark.parametrize("policy", get_args(SchedulingPolicy))
def test_the_table_made_of_events_is_the_engines_own(policy: str):
    happened: Counter[str] = Counter()
    for round_ in range(20):
        workload = EventsWorkload(random.Random(f"events {policy} {round_}"), policy)
        try:
            workload.run(100)
        except BaseException as error:
            error.add_note(f"round {round_} of policy {policy!r}: {workload.config}, {workload.runner.info}")
            raise
        stats = workload.engine.stats()
        happened += workload.happened
        happened += Counter(
            preemptions=stats.preemptions, failed_steps=stats.failed_steps, steps_ahead=workload.runner.num_ahead
        )
    # Without these it has shown nothing.
    assert happened.keys() >= {
        *("BlockStored", "BlockRemoved", "AllBlocksCleared", "duplicates"),
        *("preemptions", "failed_steps", "steps_ahead"),
    }


def test_one_event_tells_of_all_blocks_that_a_request_fills_in_a_step():
    engine = make_engine()
    prompt = list(range(18))
    run(engine, "a", prompt)
    hashes = list(engine._scheduler.kv.pool.tree.copies())
    assert engine.take_kv_events() == [
        BlockStored([number(h) for h in hashes], None, prompt[:16], 4, None, "GPU", None),
    ]
    assert engine.take_kv_events() == []
    run(engine, "b", [*prompt[:8], 7, 7, 7, 7, 7])
    [event] = engine.take_kv_events()
    assert isinstance(event, BlockStored)
    assert event.parent_block_hash == number(hashes[1]) and event.token_ids == [7, 7, 7, 7]


def test_a_block_is_told_of_when_it_is_written_and_no_sooner():
    engine = make_engine(max_num_batched_tokens=64)
    runner = engine.runner
    assert isinstance(runner, CheckingRunner)
    runner.fail_next = True
    run(engine, "a", list(range(9)))
    assert engine.take_kv_events() == []
    engine.add_request(EngineRequest("b", list(range(9)), SamplingParams(0.0, max_tokens=4)))
    assert engine.take_kv_events() == []
    engine.step()
    assert len(engine.take_kv_events()) == 1


@pytest.mark.parametrize("hashes", get_args(KVEventHashes))
def test_what_is_evicted_is_removed_before_what_takes_its_place_is_stored(hashes: KVEventHashes):
    engine = make_engine(num_blocks=4, kv_events_hashes=hashes)
    run(engine, "a", list(range(9)))
    [first] = engine.take_kv_events()
    run(engine, "b", list(range(20, 33)))
    removed, stored = engine.take_kv_events()
    assert isinstance(first, BlockStored) and isinstance(removed, BlockRemoved) and isinstance(stored, BlockStored)
    # The deepest goes first.
    assert removed.block_hashes == first.block_hashes[::-1] and removed.medium == "GPU"
    assert {type(block_hash) for block_hash in first.block_hashes} == {int if hashes == "int" else bytes}


def test_of_two_blocks_with_equal_content_the_first_is_told_of_and_the_last():
    tree = KVEventRecorder(num_groups=1, num_blocks=4)
    one, other = KVCacheBlock(0), KVCacheBlock(1)
    for block in (one, other):
        tree.add(tree.root, b"hash", token_id_bytes([1]), [block])
    tree.fill([one])
    tree.fill([other])
    # Two requests may have registered it: one that was aborted, and one that was given its block.
    tree.fill([one])
    assert [change.what for change in tree.take()] == ["stored"]
    tree.drop(one)
    assert not tree.has_changes
    tree.drop(other)
    assert [change.what for change in tree.take()] == ["removed"]


def test_a_reset_is_told_of_at_once():
    engine = make_engine()
    run(engine, "a", list(range(9)))
    engine.take_kv_events()
    engine.reset_prefix_cache()
    assert engine.take_kv_events() == [AllBlocksCleared()]


def test_extra_keys_are_those_of_the_peer_without_their_kinds():
    engine = make_engine(prefix_caching_hash_algo="sha256_cbor")
    spans = (
        ExtraKeySpan(0, None, "lora", b"\5" * 32, label="sql"),
        ExtraKeySpan(0, 1, "cache_salt", "salt"),
        ExtraKeySpan(2, 7, "mm", "cat"),
        ExtraKeySpan(6, 7, "cache_salt", "later"),
        ExtraKeySpan(9, 12, "of another frontend", "x"),
    )
    run(engine, "a", list(range(13)), *spans)
    [event] = engine.take_kv_events()
    assert isinstance(event, BlockStored)
    assert event.extra_keys == [
        ("sql", ("cat", 2), "salt"),
        ("sql", ("cat", -2), ("cache_salt", "later", 2, 3)),
        ("sql", ("of another frontend", "x", 1, 4)),
    ]
    assert event.lora_name == "sql" and event.lora_id is None


def test_groups_are_named_where_layers_differ_in_what_they_see():
    engine = make_engine(windows=(None, 6))
    run(engine, "a", list(range(13)), max_tokens=2)
    stored = [event for event in engine.take_kv_events() if isinstance(event, BlockStored)]
    told = [(e.group_idx, e.kv_cache_spec_kind, e.kv_cache_spec_sliding_window, len(e.block_hashes)) for e in stored]
    assert told == [(0, "full_attention", None, 3), (1, "sliding_window", 6, 3)]


def test_whoever_takes_events_seldom_gets_the_table_as_it_is():
    engine = make_engine(num_blocks=8)
    table = KVEventTable()
    for index in range(40):
        run(engine, f"r{index}", [index] * 13)
    events = engine.take_kv_events()
    assert events[0] == AllBlocksCleared() and len(events) < 12
    table.apply(events)
    assert table.blocks.keys() == {number(block_hash) for block_hash in own_table(engine)}


def test_nothing_is_recorded_unless_it_is_wanted():
    engine = EngineCore(EngineConfig(block_size=4), CheckingRunner(32, 4))
    run(engine, "a", list(range(9)))
    assert engine.kv_recorder is None
    assert engine.take_kv_events() == []
    with pytest.raises(InvalidConfigError, match="enable_prefix_caching"):
        make_engine(enable_prefix_caching=False)
