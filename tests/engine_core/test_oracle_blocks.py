"""The KV cache manager, operation by operation, against a peer's recorded states.

Under the peer's two rules for freed blocks every observable agrees:
hits, block ids, order of the free queue, reference counts, cached sets, duplicates.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine_core.kv_cache import KVCacheBlock, KVCacheManager, PrefixHit
from engine_core.request import Request
from tests.engine_core import oracle


def ids_in(blocks: Sequence[KVCacheBlock | None]) -> list[int]:
    """As the traces have them: what is out of the window is −1 (the peer's null block, 0)."""
    return [-1 if block is None else block.block_id for block in blocks]


def ids_of(hit: PrefixHit) -> list[int]:
    return ids_in(hit.blocks[0])


class Replay:
    """Applies trace operations to our manager and compares what they return."""

    def __init__(self, header: dict, eviction_policy: str) -> None:
        self.manager = KVCacheManager(
            header["num_usable_blocks"],
            header["block_size"],
            enable_caching=header["enable_caching"],
            full_prompt_hit="drop_last_block",
            eviction_policy=eviction_policy,
            match_unit="block",
            max_step_tokens=header["max_model_len"],
            windows=(header.get("sliding_window"),),
            window_retention="all" if header.get("retention_interval") is None else "prompt_tail",
        )
        self.hasher = oracle.make_hasher(header)
        self.hex_len = header["hash_hex_len"]
        self.num_watermark_blocks = int(header["watermark"] * header["num_blocks"])
        self.requests: dict[str, Request] = {}

    def new_request(self, op: dict, result: dict) -> None:
        request = self.requests[op["id"]] = oracle.request_of(op)
        if self.manager.enable_caching:
            self.hasher.extend(request)
            assert [h.hex()[: self.hex_len] for h in request.block_hashes] == result["block_hashes"]

    def append(self, op: dict, result: dict) -> None:
        request = self.requests[op["id"]]
        known = len(request.block_hashes)
        request.token_ids += op["tokens"]
        if self.manager.enable_caching:
            self.hasher.extend(request)
            assert [h.hex()[: self.hex_len] for h in request.block_hashes[known:]] == result["new_block_hashes"]

    def schedule(self, op: dict, result: dict) -> list[int] | None:
        """Returns the ids of newly allocated blocks."""
        request = self.requests[op["id"]]
        is_running = request.request_id in self.manager.tables
        gate = {"reserve_full_sequence": bool(op.get("full_sequence_must_fit"))}
        if is_running:
            gate["reserve_full_sequence"] = False
            remaining = request.num_tokens - request.num_computed_tokens
            num_tokens = min(op.get("num_new_tokens") or remaining, remaining)
            allocated = self.manager.allocate_slots(request, num_tokens)
        else:
            hit = self.manager.get_computed_blocks(request)
            assert hit.num_tokens == result["num_cached_tokens"]
            remaining = request.num_tokens - hit.num_tokens
            num_tokens = min(op.get("num_new_tokens") or remaining, remaining)
            spare = self.num_watermark_blocks if self.manager.tables else 0
            allocated = self.manager.allocate_slots(request, num_tokens, hit, num_spare_blocks=spare, **gate)
            if allocated is not None:
                request.num_computed_tokens = hit.num_tokens
                self.hit_ids = ids_of(hit)
        assert (allocated is not None) == result["ok"]
        if allocated is None:
            return None
        assert num_tokens == result["num_scheduled_tokens"]
        request.num_computed_tokens += num_tokens
        self.manager.commit_step()
        return [block.block_id for block in allocated]

    def lookup(self, op: dict, result: dict) -> None:
        hit = self.manager.get_computed_blocks(self.requests[op["id"]])
        assert hit.num_tokens == result["num_cached_tokens"]
        assert ids_of(hit) == oracle.ours(result["hit_block_ids"])

    def free(self, op: dict, result: dict) -> None:
        self.manager.free(self.requests.pop(op["id"]))

    def preempt(self, op: dict, result: dict) -> None:
        request = self.requests[op["id"]]
        self.manager.free(request)
        request.num_computed_tokens = 0

    def reset(self, op: dict, result: dict) -> None:
        # The peer refuses while blocks are in use.
        pool = self.manager.pool
        assert (pool.num_free_blocks == pool.num_blocks) == result["ok"]
        if result["ok"]:
            self.manager.reset_prefix_cache()

    def evict(self, op: dict, result: dict) -> None:
        self.manager.pool.unregister(self.manager.pool.blocks[block_id] for block_id in oracle.ours(op["block_ids"]))

    def stats(self, op: dict, result: dict) -> None:
        """The peer's counters; ours are the scheduler's (test_oracle_scheduler)."""


@pytest.mark.parametrize("name", oracle.trace_names("block_traces"))
def test_trace_replays_exactly(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    header, records = oracle.read_trace("block_traces", name)
    replay = Replay(header, oracle.EVICTION_POLICIES[header["free_order"]])
    pool, hex_len = replay.manager.pool, header["hash_hex_len"]
    for record in records:
        op, result, state = record["op"], record["result"], record["state"]
        outcome = getattr(replay, op["op"])(op, result)
        context = f"operation {record['i']}: {op}"
        if op["op"] == "schedule" and result["ok"]:
            assert outcome == oracle.ours(result["allocated"]), context
            if result["hit_block_ids"] is not None:
                assert replay.hit_ids == oracle.ours(result["hit_block_ids"]), context
        assert oracle.free_queue(pool) == oracle.ours(state["free_queue"]), context
        assert oracle.cached_blocks(pool, hex_len) == oracle.peer_cached_blocks(state), context
        assert oracle.ref_counts(pool) == {int(b) - 1: n for b, n in state["ref_counts"].items()}, context
        peer_duplicates = {digest: oracle.ours(ids) for digest, ids in state["duplicates"].items()}
        assert oracle.duplicates(pool, hex_len) == peer_duplicates, context
        tables = {request_id: ids_in(table.blocks[0]) for request_id, table in replay.manager.tables.items()}
        assert tables == {
            request_id: oracle.ours(request["block_ids"])
            for request_id, request in state["requests"].items()
            if request["block_ids"]
        }, context
        assert pool.usage == pytest.approx(state["usage"], abs=1e-6), context


@pytest.mark.parametrize("name", oracle.trace_names("block_traces"))
def test_hits_do_not_depend_on_the_eviction_policy_until_something_is_evicted(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    """The document's order on the peer's newer traces: hits, reference counts, cached sets agree before evictions."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    header, records = oracle.read_trace("block_traces", name)
    replay = Replay(header, "lru")
    pool = replay.manager.pool
    compared = 0
    for record in records:
        op, result, state = record["op"], record["result"], record["state"]
        getattr(replay, op["op"])(op, result)
        cached = set(oracle.cached_blocks(pool, header["hash_hex_len"]).values())
        if cached != set(oracle.peer_cached_blocks(state).values()):
            break  # the orders evict different blocks from here on
        assert sorted(oracle.ref_counts(pool).values()) == sorted(state["ref_counts"].values())
        compared += 1
    assert compared >= min(8, len(records))
