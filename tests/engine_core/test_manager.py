"""What the KV cache manager promises (docs/design.md, "Block pool invariants"), one test per promise."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine_core.kv_cache import BlockHasher, KVCacheManager, PrefixHit
from engine_core.request import Request
from ipc.vocabulary import ExtraKeySpan
from tests.engine_core.make import make_request

B = 4
HASHER = BlockHasher("sha256", B)


def new_request(request_id: str, tokens: Sequence[int], **options) -> Request:
    request = make_request(request_id, tokens, **options)
    HASHER.extend(request)
    return request


def admit(manager: KVCacheManager, request: Request, *, commit: bool = True) -> PrefixHit:
    hit = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, request.num_tokens - hit.num_tokens, hit) is not None
    if commit:
        manager.commit_step()
        request.num_computed_tokens = request.num_tokens
    return hit


def append(manager: KVCacheManager, request: Request, token_id: int) -> list[int] | None:
    request.token_ids.append(token_id)
    HASHER.extend(request)
    allocated = manager.allocate_slots(request, 1)
    if allocated is None:
        return None
    request.num_computed_tokens += 1
    manager.commit_step()
    return [block.block_id for block in allocated]


def state(manager: KVCacheManager) -> tuple:
    pool = manager.pool
    return (
        [block.block_id for block in pool.free_queue],
        [(block.ref_cnt, block.block_hash) for block in pool.blocks],
        {name: table.block_tables[0].copy() for name, table in manager.tables.items()},
    )


@pytest.mark.parametrize("num_tokens", [1, B - 1, B, B + 1, 2 * B, 2 * B + 3])
def test_a_repeated_prompt_computes_at_least_one_token_and_caches_all_it_can(num_tokens: int):
    manager = KVCacheManager(16, B)
    tokens = list(range(num_tokens))
    first = new_request("first", tokens)
    assert admit(manager, first).num_tokens == 0
    second = new_request("second", tokens)
    assert admit(manager, second).num_tokens == num_tokens - 1


def test_a_full_hit_shares_every_block_and_writes_only_new_ones():
    manager = KVCacheManager(8, B)
    tokens = list(range(2 * B))
    admit(manager, new_request("first", tokens))
    free_before = manager.pool.num_free_blocks
    second = new_request("second", tokens)
    hit = admit(manager, second)
    table = manager.tables["second"]
    assert hit.num_tokens == 2 * B - 1
    assert table.block_tables[0] == manager.tables["first"].block_tables[0] and table.num_shared_blocks == 2
    assert manager.pool.num_free_blocks == free_before, "nothing is allocated"
    assert [manager.pool.blocks[b].ref_cnt for b in table.block_tables[0]] == [2, 2]
    (new_block,) = append(manager, second, 99)
    assert new_block not in manager.tables["first"].block_tables[0], "a shared block is never written"


def test_drop_last_block_gives_up_the_whole_last_block_as_peers_do():
    manager = KVCacheManager(8, B, full_prompt_hit="drop_last_block", match_unit="block")
    tokens = list(range(2 * B))
    admit(manager, new_request("first", tokens))
    assert admit(manager, new_request("second", tokens)).num_tokens == B


def test_only_full_blocks_have_a_hash():
    manager = KVCacheManager(8, B)
    request = new_request("r", list(range(B + 1)))
    admit(manager, request)
    first, second = (manager.pool.blocks[b] for b in manager.tables["r"].block_tables[0])
    assert first.block_hash is not None and second.block_hash is None
    for token_id in range(B - 1):
        append(manager, request, 50 + token_id)
    assert second.block_hash == request.block_hashes[1]


def test_a_block_that_will_be_full_in_this_step_is_shared_in_this_step():
    manager = KVCacheManager(8, B)
    tokens = list(range(B + 2))
    admit(manager, new_request("first", tokens), commit=False)
    hit = admit(manager, new_request("second", tokens), commit=False)
    assert hit.num_tokens == B
    assert manager.tables["second"].block_tables[0][0] == manager.tables["first"].block_tables[0][0]


def test_a_withdrawn_request_leaves_nothing_of_this_step_in_the_cache():
    manager = KVCacheManager(8, B)
    request = new_request("r", list(range(2 * B + 1)))
    hit = manager.get_computed_blocks(request)
    manager.allocate_slots(request, B, hit)
    request.num_computed_tokens = B
    manager.commit_step()
    manager.allocate_slots(request, B)  # registers the second block, provisionally
    manager.withdraw(request)
    assert manager.pool.num_free_blocks == 8 and not manager.tables
    assert manager.get_computed_blocks(new_request("again", list(range(2 * B + 1)))).num_tokens == B


def test_what_a_committed_step_registered_stays_when_the_request_goes():
    manager = KVCacheManager(8, B)
    request = new_request("r", list(range(2 * B + 1)))
    admit(manager, request)
    manager.withdraw(request)
    assert manager.get_computed_blocks(new_request("again", list(range(2 * B + 1)))).num_tokens == 2 * B


def test_hits_are_touched_before_new_blocks_are_taken():
    """The hit lies at the head of the free queue: taking new blocks first would evict it."""
    manager = KVCacheManager(3, B)
    first = new_request("first", list(range(B)))
    admit(manager, first)
    manager.free(first)
    filler = new_request("filler", [77] * (2 * B))
    admit(manager, filler)
    manager.free(filler)
    assert next(iter(manager.pool.free_queue)).block_id == 0, "the cached block is next to be evicted"
    second = new_request("second", list(range(B)) + [5] * (2 * B))
    assert admit(manager, second).num_tokens == B
    table = manager.tables["second"].block_tables[0]
    assert table[0] == 0 and len(set(table)) == 3


@pytest.mark.parametrize("reserve_full_sequence", [False, True])
def test_an_allocation_that_does_not_fit_changes_nothing(reserve_full_sequence: bool):
    manager = KVCacheManager(4, B)
    first = new_request("first", list(range(B)))
    admit(manager, first)
    manager.free(first)
    admit(manager, new_request("other", [9] * B))
    big = new_request("big", list(range(4 * B)))
    hit = manager.get_computed_blocks(big)
    assert hit.num_whole_blocks == 1
    before = state(manager)
    num_new = B if reserve_full_sequence else 3 * B
    assert (
        manager.allocate_slots(big, num_new, hit, reserve_full_sequence=reserve_full_sequence, num_spare_blocks=0)
        is None
    )
    assert state(manager) == before


def test_free_hit_blocks_count_against_capacity():
    """Three blocks, two of them hits that lie in the free queue: two more blocks are not there."""
    manager = KVCacheManager(3, B)
    first = new_request("first", list(range(2 * B)))
    admit(manager, first)
    manager.free(first)
    big = new_request("big", list(range(4 * B)))
    assert manager.allocate_slots(big, 2 * B, manager.get_computed_blocks(big)) is None
    fits = new_request("fits", list(range(3 * B)))
    assert manager.allocate_slots(fits, B, manager.get_computed_blocks(fits)) is not None


def test_spare_blocks_stay_free():
    manager = KVCacheManager(4, B)
    request = new_request("r", list(range(3 * B)))
    assert manager.allocate_slots(request, 3 * B, num_spare_blocks=2) is None
    assert manager.allocate_slots(request, 3 * B, num_spare_blocks=1) is not None


def test_the_deepest_block_is_evicted_first():
    manager = KVCacheManager(4, B)
    request = new_request("r", list(range(3 * B)))
    admit(manager, request)
    manager.free(request)
    admit(manager, new_request("other", [9] * (2 * B)))
    assert manager.get_computed_blocks(new_request("again", list(range(3 * B)))).num_tokens == 2 * B


def test_a_duplicate_vanishes_when_its_request_is_freed_and_evicted():
    manager = KVCacheManager(4, B)
    tokens = list(range(B))
    admit(manager, new_request("first", tokens))
    second = new_request("second", tokens, read_prefix_cache=False)
    admit(manager, second)
    (copies,) = manager.pool.tree.copies().values()
    assert len(copies) == 2
    manager.free(second)
    manager.pool.get_new_blocks(3)
    assert list(manager.pool.tree.copies().values()) == [[manager.pool.blocks[0]]]


def test_a_request_that_does_not_read_still_writes():
    manager = KVCacheManager(8, B)
    request = new_request("r", list(range(B)), read_prefix_cache=False)
    assert admit(manager, request).num_tokens == 0
    assert manager.get_computed_blocks(new_request("reader", list(range(B + 1)))).num_tokens == B


def test_without_caching_nothing_is_found_and_nothing_has_a_hash():
    manager = KVCacheManager(8, B, enable_caching=False)
    tokens = list(range(2 * B))
    for name in ("first", "second"):
        assert admit(manager, new_request(name, tokens)).num_tokens == 0
    assert not manager.pool.tree.copies()
    assert all(block.block_hash is None for block in manager.pool.blocks)


@pytest.mark.parametrize("kind", ["cache_salt", "mm", "lora", "something of the embedder's"])
def test_no_hit_across_different_extra_keys(kind: str):
    manager = KVCacheManager(16, B)
    tokens = list(range(2 * B + 1))
    admit(manager, new_request("plain", tokens))
    admit(manager, new_request("a", tokens, extra_key_spans=(ExtraKeySpan(0, 1, kind, "a"),)))
    for key, expected in (("a", 2 * B), ("b", 0)):
        request = new_request("next", tokens, extra_key_spans=(ExtraKeySpan(0, 1, kind, key),))
        assert manager.get_computed_blocks(request).num_tokens == expected


def test_resetting_keeps_the_order_of_the_free_queue():
    manager = KVCacheManager(4, B)
    request = new_request("r", list(range(2 * B)))
    admit(manager, request)
    manager.free(request)
    order = [block.block_id for block in manager.pool.free_queue]
    manager.reset_prefix_cache()
    assert [block.block_id for block in manager.pool.free_queue] == order
    assert manager.get_computed_blocks(new_request("again", list(range(2 * B)))).num_tokens == 0


def test_who_lacked_room_lacks_it_until_enough_is_freed_or_found_in_the_cache():
    manager = KVCacheManager(12, B)
    others = [new_request(f"other {i}", [i] * (4 * B)) for i in range(2)]
    for other in others:
        admit(manager, other)
    waiting = new_request("waiting", [*range(B), *[1] * (5 * B)])

    def is_refused(num_spare_blocks: int = 0) -> bool:
        hit = manager.get_computed_blocks(waiting)
        options = {"reserve_full_sequence": True, "num_spare_blocks": num_spare_blocks}
        return manager.allocate_slots(waiting, 1, hit, **options) is None

    assert not manager.still_lacks_room(waiting), "it has not tried yet"
    assert is_refused() and manager.still_lacks_room(waiting), "6 blocks of 4"
    assert not manager.still_lacks_room(others[0]) and not manager.still_lacks_room(waiting, 1), "nobody asked that"

    first = new_request("first", [*range(B), 9])
    admit(manager, first)
    assert not manager.still_lacks_room(waiting), "its first block is cached now"
    assert is_refused() and manager.still_lacks_room(waiting), "5 blocks more, of 2"
    manager.free(first)
    assert manager.still_lacks_room(waiting), "a block freed, and the one it shares: 6 blocks of 4"
    manager.free(others[0])
    assert not manager.still_lacks_room(waiting) and not is_refused()


def test_who_lacks_room_with_a_copy_or_without_it_is_looked_up_again_when_either_has_it():
    """With windows, what a hit needs depends on where it ends: without its copy this one has nothing at all."""
    manager = KVCacheManager(30, B, windows=(None, 2 * B), max_step_tokens=64)
    first = new_request("first", range(3 * B))
    admit(manager, first)
    full, windowed = (list(blocks) for blocks in manager.tables["first"].blocks)
    manager.free(first)
    manager.pool.unregister([windowed[0]])
    manager.pool.touch([full[0], full[1], windowed[1]])
    taken = manager.pool.get_new_blocks(24)
    second = new_request("second", [*range(3 * B - 1), *range(90, 90 + B + 1)])

    def admits(num_hit_tokens: int, *, whole_blocks_only: bool) -> bool:
        hit = manager.get_computed_blocks(second, whole_blocks_only=whole_blocks_only)
        assert hit.num_tokens == num_hit_tokens
        num_new_tokens = second.num_tokens - hit.num_tokens
        return manager.allocate_slots(second, num_new_tokens, hit, reserve_full_sequence=True) is not None

    assert not admits(3 * B - 1, whole_blocks_only=False) and not admits(0, whole_blocks_only=True)
    assert manager.still_lacks_room(second)
    manager.pool.free_blocks(taken[:4])
    assert not manager.still_lacks_room(second)
    assert admits(3 * B - 1, whole_blocks_only=False)
