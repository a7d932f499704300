"""The scheduler, step by step, against a peer's recorded runs with a fake model.

Compared where semantics agree (docs/design.md lists where they do not, and why): everything scheduled, preempted and
sampled, the running and waiting order, the free queue, the cached blocks and the statistics.
"""

from __future__ import annotations

import pytest

from engine_core.kv_cache import KVCacheManager
from engine_core.runner import StepResult
from engine_core.scheduler import Scheduler
from engine_core.step import Step
from tests.engine_core import oracle


class Replay:
    def __init__(self, header: dict) -> None:
        self.header = header
        self.hasher = oracle.make_hasher(header)
        kv = KVCacheManager(
            header["num_usable_blocks"],
            header["block_size"],
            enable_caching=header["enable_caching"],
            full_prompt_hit="drop_last_block",
            match_unit="block",
            eviction_policy=oracle.EVICTION_POLICIES[header["free_order"]],
        )
        self.scheduler = Scheduler(
            kv,
            max_num_seqs=header["max_num_seqs"],
            max_num_batched_tokens=header["max_num_batched_tokens"],
            max_model_len=header["max_model_len"],
            hash_blocks=self.hasher.extend if header["enable_caching"] else lambda request: None,
            policy=header["policy"],
            enable_chunked_prefill=header["enable_chunked_prefill"],
            long_prefill_token_threshold=header["long_prefill_token_threshold"],
            reserve_full_sequence=header["scheduler_reserve_full_isl"],
            num_watermark_blocks=int(header["watermark"] * (header["num_usable_blocks"] + 1)),
            share_in_flight=False,
        )

    def add(self, op: dict, result: dict) -> None:
        request = oracle.request_of(op)
        if self.header["enable_caching"]:
            self.hasher.extend(request)
        self.scheduler.add(request)

    def abort(self, op: dict, result: dict) -> None:
        self.scheduler.abort(op["ids"])

    def reset(self, op: dict, result: dict) -> None:
        if op.get("reset_running_requests"):
            self.scheduler.preempt_all()
        # The peer refuses while blocks are in use.
        kv = self.scheduler.kv
        assert (kv.pool.num_free_blocks == kv.pool.num_blocks) == result["ok"]
        if result["ok"]:
            kv.reset_prefix_cache()

    def step(self, op: dict, result: dict) -> None:
        scheduler, vocab = self.scheduler, self.header["vocab"]
        before = {request_id: len(t.block_tables[0]) for request_id, t in scheduler.kv.tables.items()}
        resumed = {request.request_id for request in scheduler.waiting if request.num_preemptions}
        step = scheduler.schedule()
        assert self.described(step, before, resumed) == [
            entry | {"block_ids": oracle.ours(entry["block_ids"])} for entry in result["scheduled"]
        ]
        assert step.num_tokens == result["total_num_scheduled_tokens"]
        assert [request.request_id for request in step.preempted] == result["preempted"]
        after = result["state_after_schedule"]
        self.compare_queues(after)
        sampled = []
        for entry in step.scheduled:
            last, num_tokens = entry.request.token_ids[-1], entry.request.num_tokens
            sampled.append((7919 * num_tokens + 31 * last + 17) % vocab if entry.samples else None)
        outputs = scheduler.update(step, StepResult(sampled))
        got = [(o.request_id, o.new_token_ids, o.finish_reason, o.stop_reason) for o in outputs]
        assert got == [
            (o["id"], o["new_token_ids"], o["finish_reason"], o["stop_reason"])
            for o in result["outputs"]
            if o["new_token_ids"]
        ]
        for output, peer in zip(outputs, (o for o in result["outputs"] if o["new_token_ids"]), strict=True):
            if peer["num_cached_tokens"] is not None:
                assert output.num_cached_tokens == peer["num_cached_tokens"]

    def described(self, step: Step, before: dict[str, int], resumed: set[str]) -> list[dict]:
        described = []
        for entry in step.scheduled:
            request_id = entry.request.request_id
            known = before.get(request_id)
            kind = "running" if known is not None else "resumed" if request_id in resumed else "new"
            described.append(
                {
                    "id": request_id,
                    "kind": kind,
                    "num_scheduled_tokens": entry.num_tokens,
                    "num_computed_tokens_before": entry.start,
                    "block_ids": list(entry.block_tables[0])[known or 0 :],
                }
            )
        return described

    def compare_queues(self, state: dict) -> None:
        scheduler, pool = self.scheduler, self.scheduler.kv.pool
        assert [request.request_id for request in scheduler.running] == state["running"]
        assert [request.request_id for request in scheduler.waiting] == state["waiting"]
        assert oracle.free_queue(pool) == oracle.ours(state["free_queue"])
        assert oracle.cached_blocks(pool, self.header["hash_hex_len"]) == oracle.peer_cached_blocks(state)


@pytest.mark.parametrize("name", oracle.trace_names("scheduler_traces"))
def test_trace_replays_exactly(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    header, records = oracle.read_trace("scheduler_traces", name)
    replay = Replay(header)
    hits = queries = 0
    for record in records:
        op, result, state = record["op"], record["result"], record["state"]
        getattr(replay, op["op"])(op, result)
        replay.compare_queues(state)
        if op["op"] == "step":
            stats = result["stats"]["prefix_cache"]
            queries += stats["queries"]
            hits += stats["hits"]
    counters = replay.scheduler.counters
    if header["enable_caching"]:
        assert (counters.prefix_cache_queries, counters.prefix_cache_hits) == (queries, hits)
