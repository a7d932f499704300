"""Kept prefixes: who may evict whom, for how long, and that nothing kept stops anybody for good."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from engine_core.kv_cache import BlockHasher, KVCacheManager
from engine_core.request import Request
from ipc.vocabulary import ExtraKeySpan, KeepPrefix
from tests.engine_core.make import make_request
from tests.engine_core.slow_retention import Clock
from tests.engine_core.test_step_cost import count_bytecodes

B = 4
HASHER = BlockHasher("sha256", B)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_manager(
    clock: Clock, num_blocks: int = 12, share: float = 0.5, per_tenant: float = 0.5, **more: Any
) -> KVCacheManager:
    shares = {"max_kept_share": share, "max_kept_share_per_tenant": per_tenant}
    return KVCacheManager(num_blocks, B, **shares, clock=clock, **more)


def new_request(request_id: str, tokens: Sequence[int], **options: Any) -> Request:
    request = make_request(request_id, tokens, **options)
    HASHER.extend(request)
    return request


def prompt(first: int, num_blocks: int) -> list[int]:
    return [1000 * first + i for i in range(num_blocks * B)]


def run(
    manager: KVCacheManager,
    tokens: Sequence[int],
    *,
    keep: Sequence[KeepPrefix] = (),
    tenant: str = "",
    **how: Any,
) -> tuple[int, ...]:
    """A request comes, computes its prompt and ends; of each of `keep`, how many tokens are kept."""
    request = begin(manager, tokens, keep=keep, tenant=tenant, **how)
    manager.free(request)
    return request.num_kept_tokens


def begin(
    manager: KVCacheManager,
    tokens: Sequence[int],
    *,
    keep: Sequence[KeepPrefix] = (),
    tenant: str = "",
    write: bool = True,
    read: bool = True,
    num_step_tokens: int = 1 << 20,
    extra_key_spans: tuple[ExtraKeySpan, ...] = (),
) -> Request:
    manager.release_expired()
    cache = {"keep": tuple(keep), "tenant": tenant, "write_prefix_cache": write, "read_prefix_cache": read}
    request = new_request(f"{tenant} {random.random()}", tokens, extra_key_spans=extra_key_spans, **cache)
    hit = manager.get_computed_blocks(request)
    request.num_computed_tokens = hit.num_tokens
    while request.num_computed_tokens < request.num_tokens:
        num_tokens = min(num_step_tokens, request.num_tokens - request.num_computed_tokens)
        assert manager.allocate_slots(request, num_tokens, hit) is not None
        manager.commit_step()
        request.num_computed_tokens += num_tokens
    if keep:
        request.num_kept_tokens = manager.keep_prompt(request)
    return request


def num_cached(manager: KVCacheManager, tokens: Sequence[int]) -> int:
    """Of a prompt that begins so, how many tokens would be found."""
    return manager.get_computed_blocks(new_request("asks", [*tokens, 9])).num_tokens


def flood(manager: KVCacheManager, num_blocks: int = 30, **how: Any) -> None:
    """Others come, with so many blocks in all, two at a time."""
    for first in range(num_blocks // 2):
        run(manager, prompt(100 + first, 2), **how)


def test_a_kept_prefix_outlasts_any_number_of_others_for_its_time(clock: Clock):
    manager = make_manager(clock)
    assert run(manager, prompt(1, 3), keep=[KeepPrefix(3 * B, 60.0)]) == (3 * B,)
    run(manager, prompt(2, 3))
    clock.now_s = 59.0
    flood(manager)
    assert num_cached(manager, prompt(1, 3)) == 3 * B and num_cached(manager, prompt(2, 3)) == 0
    clock.now_s = 61.0
    flood(manager)
    assert num_cached(manager, prompt(1, 3)) == 0
    assert manager.pool.kept.num_blocks == 0 and manager.pool.num_free_blocks == 12


def test_each_use_begins_its_time_again_and_only_of_what_was_used(clock: Clock):
    manager = make_manager(clock)
    run(manager, prompt(1, 4), keep=[KeepPrefix(4 * B, 60.0)])
    clock.now_s = 50.0
    run(manager, prompt(1, 2) + prompt(7, 1))
    clock.now_s = 100.0
    flood(manager)
    assert num_cached(manager, prompt(1, 4)) == 2 * B
    clock.now_s = 111.0
    flood(manager)
    assert num_cached(manager, prompt(1, 4)) == 0


def test_time_does_not_pass_while_a_request_uses_it(clock: Clock):
    manager = make_manager(clock)
    request = begin(manager, prompt(1, 2), keep=[KeepPrefix(2 * B, 60.0)])
    clock.now_s = 1000.0
    flood(manager)
    manager.free(request)
    clock.now_s = 1059.0
    flood(manager)
    assert num_cached(manager, prompt(1, 2)) == 2 * B


def test_a_clock_that_stands_still_keeps_everything_and_one_that_jumps_nothing(clock: Clock):
    manager = make_manager(clock)
    for first in range(3):
        run(manager, prompt(first, 2), keep=[KeepPrefix(2 * B, 1.0)])
    flood(manager, 200)
    assert [num_cached(manager, prompt(first, 2)) for first in range(3)] == [2 * B] * 3
    clock.now_s = 1e9
    manager.release_expired()
    assert manager.pool.kept.num_blocks == 0 and manager.pool.num_unkept_free_blocks == 12
    assert [num_cached(manager, prompt(first, 2)) for first in range(3)] == [2 * B] * 3, "nobody has taken them yet"


def test_what_is_beyond_the_share_of_a_tenant_or_of_all_is_as_any_other(clock: Clock):
    manager = make_manager(clock, num_blocks=20, share=0.5, per_tenant=0.3)
    assert run(manager, prompt(1, 8), keep=[KeepPrefix(8 * B, 60.0)], tenant="a") == (6 * B,)
    assert run(manager, prompt(2, 2), keep=[KeepPrefix(2 * B, 60.0)], tenant="a") == (0,)
    assert run(manager, prompt(3, 6), keep=[KeepPrefix(6 * B, 60.0)], tenant="b") == (4 * B,)
    flood(manager)
    assert [num_cached(manager, prompt(first, 8)) for first in (1, 2, 3)] == [6 * B, 0, 4 * B]
    assert manager.pool.kept.num_blocks == 10
    assert manager.pool.kept.num_refused_blocks == 2 + 2 + 2


def test_a_tenant_at_its_share_cannot_push_out_anothers(clock: Clock):
    manager = make_manager(clock, num_blocks=20, share=0.5, per_tenant=0.25)
    run(manager, prompt(1, 5), keep=[KeepPrefix(5 * B, 60.0)], tenant="a")
    for first in range(50):
        keep = [KeepPrefix(3 * B, 3600.0, priority=100)]
        run(manager, prompt(10 + first, 3), keep=keep, tenant="b")
    assert num_cached(manager, prompt(1, 5)) == 5 * B


def test_within_its_share_what_matters_more_displaces_what_matters_less(clock: Clock):
    manager = make_manager(clock, num_blocks=20, per_tenant=0.3)
    run(manager, prompt(1, 3), keep=[KeepPrefix(3 * B, 60.0, priority=5)])
    run(manager, prompt(2, 3), keep=[KeepPrefix(3 * B, 60.0, priority=1)])
    assert run(manager, prompt(3, 2), keep=[KeepPrefix(2 * B, 60.0, priority=5)]) == (2 * B,)
    assert run(manager, prompt(4, 3), keep=[KeepPrefix(3 * B, 60.0, priority=1)]) == (0,)
    flood(manager)
    assert [num_cached(manager, prompt(first, 3)) for first in (1, 2, 3)] == [3 * B, B, 2 * B]
    assert manager.pool.kept.num_given_up_blocks == 2


def test_what_several_cover_is_kept_on_the_best_terms(clock: Clock):
    manager = make_manager(clock)
    kept = run(manager, prompt(1, 4), keep=[KeepPrefix(B + 1, 3600.0), KeepPrefix(4 * B, 300.0)])
    assert kept == (B + 1, 4 * B)
    clock.now_s = 301.0
    flood(manager)
    assert num_cached(manager, prompt(1, 4)) == 2 * B


def test_who_keeps_it_longer_has_it_count_to_his_share(clock: Clock):
    manager = make_manager(clock, num_blocks=20, share=1.0, per_tenant=0.2)
    run(manager, prompt(1, 4), keep=[KeepPrefix(4 * B, 60.0)], tenant="a")
    assert run(manager, prompt(1, 4), keep=[KeepPrefix(4 * B, 60.0)], tenant="b") == (4 * B,)
    assert run(manager, prompt(2, 4), keep=[KeepPrefix(4 * B, 60.0)], tenant="b") == (4 * B,), "a's are no burden"
    assert run(manager, prompt(1, 4), keep=[KeepPrefix(4 * B, 600.0)], tenant="c") == (4 * B,)
    assert run(manager, prompt(3, 4), keep=[KeepPrefix(4 * B, 60.0)], tenant="a") == (4 * B,), "c's now"


def test_what_two_requests_want_of_a_block_is_the_longer_time_and_the_higher_priority(clock: Clock):
    manager = make_manager(clock, num_blocks=20, per_tenant=0.2)
    run(manager, prompt(1, 2), keep=[KeepPrefix(2 * B, 600.0)])
    run(manager, prompt(1, 2), keep=[KeepPrefix(2 * B, 60.0, priority=5)])
    run(manager, prompt(2, 2), keep=[KeepPrefix(2 * B, 60.0, priority=1)])
    assert run(manager, prompt(3, 3), keep=[KeepPrefix(3 * B, 60.0, priority=4)]) == (2 * B,), "in place of the second"
    clock.now_s = 599.0
    flood(manager)
    assert num_cached(manager, prompt(1, 2)) == 2 * B


def test_nobody_displaces_what_another_tenant_wants_kept_as_well(clock: Clock):
    """Even if he pays for it: else who shares a prefix could take it over for longer, and push it out."""
    manager = make_manager(clock, num_blocks=20, share=1.0, per_tenant=0.2)
    run(manager, prompt(1, 3), keep=[KeepPrefix(3 * B, 60.0)], tenant="victim")
    run(manager, prompt(1, 3), keep=[KeepPrefix(3 * B, 61.0)], tenant="other")
    for first in range(10):
        keep = [KeepPrefix(4 * B, 3600.0, priority=100)]
        assert run(manager, prompt(10 + first, 4), keep=keep, tenant="other") == ((B,) if first == 0 else (0,))
    flood(manager)
    assert num_cached(manager, prompt(1, 3)) == 3 * B


def test_kept_are_the_blocks_that_lookups_find(clock: Clock):
    """Not those that a request has filled again because it was not to read."""
    manager = make_manager(clock)
    first = begin(manager, prompt(1, 2))
    assert run(manager, prompt(1, 2), keep=[KeepPrefix(2 * B, 60.0)], read=False) == (2 * B,)
    manager.free(first)
    clock.now_s = 50.0
    run(manager, prompt(1, 2) + prompt(2, 1))
    clock.now_s = 100.0
    flood(manager)
    assert num_cached(manager, prompt(1, 2)) == 2 * B, "it was used 50 s ago"


@pytest.mark.parametrize("num_step_tokens", [B, 3 * B, 10 * B])
def test_with_windows_a_hit_at_the_end_of_each_prefix_is_kept_and_not_what_is_far_before(
    clock: Clock, num_step_tokens: int
):
    manager = make_manager(clock, num_blocks=80, windows=(None, B + 2), max_step_tokens=10 * B)
    tokens = prompt(1, 10)
    kept = [KeepPrefix(4 * B, 60.0), KeepPrefix(9 * B + 2, 60.0)]
    assert run(manager, tokens, keep=kept, num_step_tokens=num_step_tokens) == (4 * B, 9 * B + 2)
    assert manager.pool.kept.num_blocks == 10 + 2 * 3, "all, and those of two windows"
    flood(manager, 100)
    assert num_cached(manager, tokens[: 4 * B]) == 4 * B
    assert num_cached(manager, tokens[: 9 * B + 2]) == 9 * B + 2


def test_what_left_its_window_and_was_evicted_is_not_said_to_be_kept(clock: Clock):
    manager = make_manager(clock, num_blocks=24, windows=(None, B + 2), max_step_tokens=B)
    request = begin(manager, prompt(1, 8), num_step_tokens=B)
    flood(manager, 60)
    request.keep = (KeepPrefix(4 * B, 60.0), KeepPrefix(8 * B, 60.0))
    assert manager.keep_prompt(request) == (0, 8 * B)
    manager.free(request)


def test_of_a_block_that_cannot_be_found_nothing_is_said_to_be_kept(clock: Clock):
    manager = make_manager(clock, match_unit="block")
    tokens = [*prompt(1, 2), 5, 6]
    assert run(manager, tokens, keep=[KeepPrefix(B + 1, 60.0), KeepPrefix(2 * B + 2, 60.0)]) == (B + 1, 2 * B)
    assert manager.pool.kept.num_blocks == 2


def test_beside_others_nobody_gets_a_kept_block_and_alone_everybody_does(clock: Clock):
    manager = make_manager(clock)
    run(manager, prompt(1, 6), keep=[KeepPrefix(6 * B, 60.0)])
    other = begin(manager, prompt(2, 1))
    large = new_request("large", prompt(3, 6))
    no_hit = manager.get_computed_blocks(large)
    how = {"reserve_full_sequence": True}
    assert manager.allocate_slots(large, 6 * B, no_hit, **how) is None
    assert manager.still_lacks_room(large), "5 blocks are neither in use nor kept"
    manager.free(other)
    assert not manager.still_lacks_room(large)
    huge = new_request("huge", prompt(4, 12))
    assert manager.allocate_slots(huge, 12 * B, manager.get_computed_blocks(huge), **how) is not None
    assert manager.pool.kept.num_given_up_blocks == 6 and manager.pool.kept.num_blocks == 0
    manager.free(huge)
    assert manager.pool.num_free_blocks == manager.pool.num_unkept_free_blocks == 12


def test_a_hit_of_kept_blocks_takes_no_room_from_others(clock: Clock):
    manager = make_manager(clock)
    run(manager, prompt(1, 6), keep=[KeepPrefix(6 * B, 60.0)])
    other = begin(manager, prompt(2, 3))
    again = new_request("again", prompt(1, 6) + prompt(5, 3))
    hit = manager.get_computed_blocks(again)
    assert hit.num_tokens == 6 * B
    assert manager.allocate_slots(again, 3 * B, hit, reserve_full_sequence=True) is not None
    manager.free(again)
    manager.free(other)


def test_the_end_of_a_prompt_within_a_block_is_kept_as_well(clock: Clock):
    manager = make_manager(clock)
    tokens = [*prompt(1, 2), 5, 6]
    assert run(manager, tokens, keep=[KeepPrefix(2 * B + 2, 60.0)]) == (2 * B + 2,)
    flood(manager)
    assert num_cached(manager, tokens) == 2 * B + 2


def test_who_writes_nothing_leaves_everything_cached(clock: Clock):
    """A batch job of three times the pool, in requests of half of it, beside an interactive prefix."""
    manager = make_manager(clock)
    run(manager, prompt(1, 5))
    for first in range(6):
        run(manager, prompt(10 + first, 6), write=False)
    assert num_cached(manager, prompt(1, 5)) == 5 * B
    assert not any(num_cached(manager, prompt(10 + first, 6)) for first in range(6))
    run(manager, prompt(10, 6))
    run(manager, prompt(11, 6))
    assert num_cached(manager, prompt(1, 5)) < 5 * B, "and who writes does not"


def test_who_writes_nothing_reads_and_is_copied_from_by_nobody(clock: Clock):
    manager = make_manager(clock)
    run(manager, prompt(1, 2))
    silent = begin(manager, [*prompt(1, 2), 5, 6], write=False)
    assert manager.tables[silent.request_id].num_shared_blocks == 2
    assert num_cached(manager, [*prompt(1, 2), 5, 6]) == 2 * B
    manager.free(silent)
    assert num_cached(manager, [*prompt(1, 2), 5, 6]) == 2 * B


def test_a_reset_forgets_what_is_kept_too(clock: Clock):
    manager = make_manager(clock)
    run(manager, prompt(1, 3), keep=[KeepPrefix(3 * B, 60.0)])
    running = begin(manager, prompt(2, 2), keep=[KeepPrefix(2 * B, 60.0)])
    manager.reset_prefix_cache()
    assert num_cached(manager, prompt(1, 3)) == num_cached(manager, prompt(2, 2)) == 0
    assert manager.pool.kept.num_blocks == 0 and manager.pool.num_unkept_free_blocks == 10
    manager.free(running)
    assert num_cached(manager, prompt(2, 2)) == 0 and manager.pool.num_unkept_free_blocks == 12


def test_ten_thousand_kept_prefixes_of_as_many_tenants(clock: Clock):
    """And a million uses of one: what is remembered of them is bounded by what is kept."""
    manager = make_manager(clock, num_blocks=20_000, share=0.5, per_tenant=0.01)
    for first in range(10_000):
        assert run(manager, prompt(first, 1), keep=[KeepPrefix(B, 3600.0)], tenant=f"tenant {first}") == (B,)
    kept = manager.pool.kept
    assert kept.num_blocks == 10_000 == len(kept._tenants)
    for _ in range(300):
        run(manager, prompt(0, 1))
    assert len(kept._expiries) <= 64 + 4 * 10_000
    assert len(kept._tenants["tenant 0"].keeps) <= 64 + 4
    alone = new_request("alone", prompt(10_001, 15_000))
    assert manager.allocate_slots(alone, alone.num_tokens, manager.get_computed_blocks(alone)) is not None
    assert kept.num_blocks == kept.num_given_up_blocks == 5_000
    manager.free(alone)
    clock.now_s = 3601.0
    manager.release_expired()
    assert not kept._tenants and not kept._expiries and manager.pool.num_unkept_free_blocks == 20_000


def test_to_look_for_a_prompt_costs_no_more_beside_ten_thousand_kept_prefixes_and_salts(clock: Clock):
    """To find it, to admit it and to free it, counted in bytecodes; and to keep it."""

    def cost(num_kept: int) -> int:
        manager = make_manager(clock, num_blocks=20_100, share=0.5, per_tenant=0.01)
        for first in range(num_kept):
            salt = (ExtraKeySpan(0, 1, "cache_salt", str(first)),)
            run(manager, prompt(1, 1), keep=[KeepPrefix(B, 3600.0)], tenant=str(first), extra_key_spans=salt)
        keep = [KeepPrefix(4 * B, 3600.0)]
        for _ in range(2):
            num_bytecodes = count_bytecodes(lambda: run(manager, prompt(1, 4), keep=keep, tenant="own"))
        assert manager.pool.kept.num_blocks == num_kept + 4
        return num_bytecodes

    assert cost(10_000) < 1.2 * cost(10)


def test_to_give_up_the_blocks_of_ten_thousand_tenants_costs_no_more_for_each(clock: Clock):
    def cost(num_tenants: int) -> float:
        manager = make_manager(clock, num_blocks=num_tenants, share=1.0, per_tenant=1.0)
        for first in range(num_tenants):
            run(manager, prompt(first, 1), keep=[KeepPrefix(B, 3600.0)], tenant=f"tenant {first}")
        assert manager.pool.num_unkept_free_blocks == 0
        return count_bytecodes(lambda: manager.pool.get_new_blocks(num_tenants)) / num_tenants

    assert cost(3_000) < 1.5 * cost(100)
