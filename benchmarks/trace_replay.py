"""Public traces of requests, replayed without a model through the real scheduler, KV cache manager and block pool."""

from __future__ import annotations

import gzip
import heapq
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_core.config import EvictionPolicy, PrefixMatchUnit
from engine_core.kv_cache import BlockHasher, KVCacheManager
from engine_core.request import Request
from engine_core.runner import StepResult
from engine_core.scheduler import Scheduler
from ipc.vocabulary import EngineRequest, SamplingParams

NEVER = sys.maxsize


@dataclass(frozen=True)
class TraceRequest:
    """What was asked, and at least one token of what was answered."""

    prompt: Sequence[int]
    output: Sequence[int] = (0,)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a gzipped file, one a line."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def requests_of_blocks(block_ids: Iterable[Sequence[int]], block_size: int) -> list[TraceRequest]:
    """Prompts made of whole blocks, each named by an id that stands for it and all before it."""
    return [TraceRequest([block for block in ids for _ in range(block_size)]) for ids in block_ids]


def requests_of_text(records: Iterable[dict[str, Any]], encode: Callable[[str], list[int]]) -> list[TraceRequest]:
    """Prompts and answers of the records that have both; tokens are those of the text."""
    requests = []
    for record in records:
        prompt, output = encode(record["input"]), encode(record["output"])
        if prompt:
            requests.append(TraceRequest(prompt, output or (0,)))
    return requests


@dataclass
class ReplayTotals:
    """What a replay added up: of all prompts, and of what was found cached of them."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_prompt_blocks: int = 0
    num_cached_blocks: int = 0
    num_prefilled_tokens: int = 0

    @property
    def block_hit_rate(self) -> float:
        """Share of the prompts' blocks, a begun one counted whole, that were shared."""
        return self.num_cached_blocks / self.num_prompt_blocks

    @property
    def token_hit_rate(self) -> float:
        return self.num_cached_tokens / self.num_prompt_tokens


def replay(
    requests: Sequence[TraceRequest],
    num_blocks: int,
    block_size: int,
    policy: EvictionPolicy,
    *,
    match_unit: PrefixMatchUnit = "block",
    max_num_seqs: int = 1,
) -> ReplayTotals:
    """Serve all requests in order, at most `max_num_seqs` at once, each as soon as one before it has ended.

    Every prompt is computed in one step. Answers are those of the trace, whatever was cached.
    """
    hasher = BlockHasher("sha256", block_size)
    longest = max(len(request.prompt) + len(request.output) for request in requests)
    scheduler = Scheduler(
        KVCacheManager(num_blocks, block_size, match_unit=match_unit, eviction_policy=policy),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs * longest,
        max_model_len=longest + 1,
        hash_blocks=hasher.extend,
    )
    totals = ReplayTotals()
    outputs: dict[str, Sequence[int]] = {}
    upcoming = enumerate(requests)
    while True:
        while len(scheduler.requests) < max_num_seqs and (following := next(upcoming, None)) is not None:
            number, traced = following
            request_id = str(number)
            outputs[request_id] = traced.output
            scheduler.add(_request(request_id, traced, hasher))
            totals.num_prompt_tokens += len(traced.prompt)
            totals.num_prompt_blocks += -(-len(traced.prompt) // block_size)
        if not scheduler.requests:
            return totals
        step = scheduler.schedule()
        token_ids: list[int | None] = []
        for entry in step.scheduled:
            request = entry.request
            if entry.start < request.num_prompt_tokens and request.num_preemptions == 0:
                totals.num_cached_tokens += entry.start
                totals.num_cached_blocks += entry.num_shared_blocks
                totals.num_prefilled_tokens += entry.num_tokens
            output = outputs[request.request_id]
            token_ids.append(output[request.num_output_tokens] if entry.samples else None)
        scheduler.update(step, StepResult(token_ids))


def _request(request_id: str, traced: TraceRequest, hasher: BlockHasher) -> Request:
    max_tokens = len(traced.output)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    message = EngineRequest(request_id, list(traced.prompt), params)
    request = Request(message, max_tokens=max_tokens, seed=0, arrival_time_s=0.0)
    hasher.extend(request)
    return request


def optimal_hits(block_ids: Sequence[Sequence[int]], num_blocks: int) -> int:
    """How many blocks a pool could have found that knows the future, one request being served after another.

    Belady's rule: what is used again last goes first, of equals the deepest. A block is never used without those before
    it, so none goes before its children. As in the real pool, what a request needs is held while it is served.
    """
    next_uses: list[list[int]] = []
    coming: dict[int, int] = {}
    for number in range(len(block_ids) - 1, -1, -1):
        next_uses.append([coming.get(block, NEVER) for block in block_ids[number]])
        coming.update(dict.fromkeys(block_ids[number], number))
    next_uses.reverse()
    cached: dict[int, int] = {}  # block → its next use
    heap: list[tuple[int, int, int]] = []
    num_hits = 0
    for number, ids in enumerate(block_ids):
        num_hits += next((depth for depth, block in enumerate(ids) if block not in cached), len(ids))
        cached.update(dict.fromkeys(ids, number))
        while len(cached) > num_blocks:
            next_use, _, block = heapq.heappop(heap)
            if cached.get(block) == -next_use:
                del cached[block]
        for depth, (block, next_use) in enumerate(zip(ids, next_uses[number], strict=True)):
            cached[block] = next_use
            heapq.heappush(heap, (-next_use, -depth, block))
    return num_hits
