"""The published prefix-caching walk-through: block size 4, ten blocks, three requests. `-s` shows the queues."""

from __future__ import annotations

from engine_core.kv_cache import BlockHasher, KVCacheManager
from engine_core.request import Request
from tests.engine_core.make import make_request


def show(title: str, manager: KVCacheManager) -> str:
    queue = "-".join(str(block.block_id) for block in manager.pool.free_queue)
    "; ".join(f"request {name}: {table.block_tables[0]}" for name, table in manager.tables.items())
    return queue


def test_the_document_example_gives_the_document_queues():
    manager = KVCacheManager(10, 4, match_unit="block")
    hasher = BlockHasher("sha256", 4)

    def admit(request: Request) -> list[int]:
        """Returns the ids of the blocks found in the cache."""
        hasher.extend(request)
        hit = manager.get_computed_blocks(request)
        assert manager.allocate_slots(request, request.num_tokens - hit.num_tokens, hit) is not None
        manager.commit_step()
        request.num_computed_tokens = request.num_tokens
        return [block.block_id for block in hit.blocks[0] if block is not None]

    def generate(request: Request, token_id: int) -> None:
        request.token_ids.append(token_id)
        hasher.extend(request)
        assert manager.allocate_slots(request, 1) is not None
        manager.commit_step()
        request.num_computed_tokens += 1

    def table(request: Request) -> list[int]:
        return manager.tables[request.request_id].block_tables[0]

    tokens = list(range(15))
    assert show("start", manager) == "0-1-2-3-4-5-6-7-8-9"

    first = make_request("0", tokens)
    assert admit(first) == []
    assert table(first) == [0, 1, 2, 3]
    assert show("request 0: 15 tokens", manager) == "4-5-6-7-8-9"

    generate(first, 100)  # fills block 3
    assert table(first) == [0, 1, 2, 3]
    generate(first, 101)  # opens block 4
    assert table(first) == [0, 1, 2, 3, 4]
    assert show("request 0: two more", manager) == "5-6-7-8-9"

    second = make_request("1", [*tokens[:10], 210, 211, 212, 213])
    assert admit(second) == [0, 1]
    assert table(second) == [0, 1, 5, 6]
    assert show("request 1: 14, shares 10", manager) == "7-8-9"

    manager.free(first)
    assert show("request 0 is done", manager) == "7-8-9-4-3-2"
    manager.free(second)
    assert show("request 1 is done", manager) == "7-8-9-4-3-2-6-5-1-0"

    third = make_request("2", tokens[:12] + list(range(300, 317)))
    assert admit(third) == [0, 1, 2]
    assert table(third) == [0, 1, 2, 7, 8, 9, 4, 3]
    assert show("request 2: 29, shares 12", manager) == "6-5"
