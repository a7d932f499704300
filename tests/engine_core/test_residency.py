"""Blocks that are watched tell how long they stayed and when they were used again; nobody else notices."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine_core import EngineConfig, EngineCore, InvalidConfigError
from engine_core.kv_cache import BlockResidency, residency
from engine_core.kv_cache.residency import ObservedBlockPool
from ipc.stats import RESIDENCY_BOUNDS_S
from ipc.vocabulary import EngineRequest, SamplingParams
from tests.checking_runner import CheckingRunner, expected_output
from tests.engine_core.cached import cache_apart

B = 4


class Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(residency, "time", clock)
    return clock


def totals(watched: BlockResidency) -> dict[str, tuple[int, float]]:
    return {name: (sum(durations.counts), durations.sum_s) for name, durations in watched.durations().items()}


def test_a_blocks_life(clock: Clock) -> None:
    watched = BlockResidency(1.0)
    pool = ObservedBlockPool(2, "lru", 1, residency=watched)
    (block,) = pool.get_new_blocks(1)
    cache_apart(pool, [block], [b"hash"])
    clock.now_s += 3
    pool.touch([block])  # a second request finds it
    clock.now_s += 4
    pool.touch([block])
    assert totals(watched) == {"lifetime": (0, 0), "idle_before_evict": (0, 0), "reuse_gap": (2, 7)}
    for _ in range(3):
        pool.free_blocks([block])
    clock.now_s += 10
    pool.get_new_blocks(2)
    assert totals(watched) == {"lifetime": (1, 17), "idle_before_evict": (1, 10), "reuse_gap": (2, 7)}
    (place,) = [i for i, count in enumerate(watched.durations()["lifetime"].counts) if count]
    assert RESIDENCY_BOUNDS_S[place - 1] < 17 <= RESIDENCY_BOUNDS_S[place]


@pytest.mark.parametrize("give_up", ["without hash", "reset"])
def test_what_nobody_could_find_any_more_is_no_eviction(clock: Clock, give_up: str) -> None:
    watched = BlockResidency(1.0)
    pool = ObservedBlockPool(1, "lru", 1, residency=watched)
    (block,) = pool.get_new_blocks(1)
    if give_up == "reset":
        cache_apart(pool, [block], [b"hash"])
    pool.free_blocks([block])
    if give_up == "reset":
        pool.reset()
    clock.now_s += 5
    pool.get_new_blocks(1)
    assert totals(watched)["lifetime"] == (0, 0)


def test_a_pool_without_enough_blocks_changes_nothing(clock: Clock) -> None:
    watched = BlockResidency(1.0)
    pool = ObservedBlockPool(1, "lru", 1, residency=watched)
    (block,) = pool.get_new_blocks(1)
    cache_apart(pool, [block], [b"hash"])
    pool.free_blocks([block])
    with pytest.raises(IndexError):
        pool.get_new_blocks(2)
    assert totals(watched)["lifetime"] == (0, 0) and pool.tree.num_held


def test_a_sample_is_a_share_of_the_blocks() -> None:
    watched = BlockResidency(0.25)
    pool = ObservedBlockPool(4000, "lru", 1, residency=watched)
    blocks = pool.get_new_blocks(4000)
    cache_apart(pool, blocks, [str(block.block_id).encode() for block in blocks])
    pool.free_blocks(blocks)
    pool.get_new_blocks(4000)
    # Within five standard deviations.
    assert abs(totals(watched)["lifetime"][0] - 1000) < 5 * (4000 * 0.25 * 0.75) ** 0.5


def engine(**settings: object) -> EngineCore:
    config = EngineConfig(block_size=B, max_num_seqs=4, **settings)  # type: ignore[arg-type]
    return EngineCore(config, CheckingRunner(12, B))


def serve(engine: EngineCore, start: int) -> list[int]:
    prompt = list(range(start, start + 20))
    engine.add_request(EngineRequest(f"r{start}", prompt, SamplingParams(temperature=0, max_tokens=4)))
    tokens = []
    while engine.has_unfinished_requests():
        tokens += [token for output in engine.step().outputs for token in output.new_token_ids]
    assert tokens == expected_output(prompt, 4, 1000)
    return tokens


def test_an_engine_that_watches_computes_the_same_and_tells() -> None:
    watching, plain = engine(kv_cache_metrics=True, kv_cache_metrics_sample=1.0), engine()
    for start in (0, 0, 100, 200, 300, 0):
        assert serve(watching, start) == serve(plain, start)
    told = watching.stats().block_residency
    assert sum(told["lifetime"].counts) == sum(told["idle_before_evict"].counts) > 0
    assert sum(told["reuse_gap"].counts) >= 4
    assert plain.stats().block_residency == {}
    assert watching.stats().prefix_cache_hits == plain.stats().prefix_cache_hits


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5])
def test_a_sample_that_is_no_share_is_refused(share: float) -> None:
    build: Callable[[], EngineCore] = lambda: engine(kv_cache_metrics_sample=share)  # noqa: E731
    with pytest.raises(InvalidConfigError, match="kv_cache_metrics_sample"):
        build()
