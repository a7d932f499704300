"""Our half of `benchmarks.bookkeeping`: hashing, block pool and scheduler, no model."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.bookkeeping_protocol import Timings, mean_of_steps, random_token_ids, seconds, serve
from engine_core.config import HashAlgo
from engine_core.kv_cache import BlockHasher, KVCacheManager, PrefixHit
from engine_core.request import Request
from engine_core.runner import StepResult
from engine_core.scheduler import Scheduler
from ipc.vocabulary import EngineRequest, SamplingParams


class Foreword:
    """One method for each measurement; `w` is `benchmarks.bookkeeping.WORKLOAD`. Times are in seconds."""

    def __init__(self, w: dict[str, Any]) -> None:
        self.w = w
        self.block_size: int = w["block_size"]
        self.num_prompt_blocks: int = w["prompt_tokens"] // self.block_size
        self.hashers: dict[HashAlgo, BlockHasher] = {
            "sha256": BlockHasher("sha256", self.block_size),
            "sha256_cbor": BlockHasher("sha256_cbor", self.block_size),
        }
        self._schedulers: dict[str, Scheduler] = {}

    def request(self, name: str, token_ids: list[int], algo: HashAlgo = "sha256", max_tokens: int = 16) -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        request = Request(EngineRequest(name, token_ids, params), max_tokens=max_tokens, seed=0, arrival_time_s=0.0)
        self.hashers[algo].extend(request)
        return request

    def hashing(self, algo: HashAlgo) -> dict[str, float]:
        """Per block of a prompt, from its token ids to the list of hashes."""
        timings = Timings()
        for index in range(self.w["num_prompts"]):
            request = self.request("r", random_token_ids(self.w, seed=index), algo)
            request.block_hashes = []
            timings.time("prompt", self.hashers[algo].extend, request)
        return {"prompt": timings.medians_s()["prompt"] / self.num_prompt_blocks}

    def prompts(self) -> dict[str, float]:
        """Whole prompts, unknown to the cache and then known to it; the later half of them evict former ones."""
        num_prompts = self.w["num_prompts"]
        manager = KVCacheManager(num_prompts // 2 * self.num_prompt_blocks, self.block_size)
        timings = Timings()
        hit: PrefixHit
        allocated: Any = None

        def lookup() -> None:
            nonlocal hit
            hit = manager.get_computed_blocks(request)

        def allocate() -> None:
            nonlocal allocated
            allocated = manager.allocate_slots(request, request.num_tokens - hit.num_tokens, hit)
            # A step that has run: only then can these blocks be copied from. The peer has nothing like it.
            manager.commit_step()

        for index in range(num_prompts):
            token_ids = random_token_ids(self.w, seed=index)
            request = self.request("cold", token_ids)
            timings.time("lookup_miss", lookup)
            timings.time("allocate_free" if index < num_prompts // 2 else "allocate_evict", allocate)
            assert hit.num_tokens == 0 and len(allocated) == self.num_prompt_blocks
            timings.time("free", manager.free, request)
            request = self.request("warm", token_ids)
            timings.time("lookup_hit", lookup)
            timings.time("allocate_hit", allocate)
            assert hit.num_whole_blocks == self.num_prompt_blocks and allocated is not None
            timings.time("free_hit", manager.free, request)
        return timings.medians_s()

    def decode_append(self) -> dict[str, float]:
        """Per request and token: append what was sampled, hash the block it fills, allocate the next step's slot."""
        num_requests = self.w["num_running"]
        manager = KVCacheManager(num_requests * 8, self.block_size)
        extend = self.hashers["sha256"].extend
        requests = [self.request(f"r{i}", [i] * (32 + i % self.block_size)) for i in range(num_requests)]
        for request in requests:
            manager.allocate_slots(request, request.num_tokens)
            request.num_computed_tokens = request.num_tokens

        def steps() -> None:
            for _ in range(self.block_size):
                for request in requests:
                    request.token_ids.append(7)
                    extend(request)
                    manager.allocate_slots(request, 1)
                    request.num_computed_tokens += 1

        return {"token": seconds(steps) / num_requests / self.block_size}

    def scheduler(self, num_waiting: int, num_cached: int, head_tokens: int) -> Scheduler:
        """`num_running` requests decoding, `num_waiting` that wait for a seat, `num_cached` hashes nobody uses.

        With `head_tokens` there is a seat, and a prompt of that many cached tokens waits for blocks to become free.
        """
        w, block_size = self.w, self.block_size
        num_blocks = w["num_running"] * (w["running_tokens"] // block_size + w["spare_blocks_per_request"])
        num_blocks += num_cached + head_tokens // block_size
        scheduler = Scheduler(
            KVCacheManager(num_blocks, block_size),
            max_num_seqs=w["num_running"] + bool(head_tokens),
            max_num_batched_tokens=w["max_num_batched_tokens"],
            max_model_len=w["max_model_len"],
            hash_blocks=self.hashers["sha256"].extend,
        )
        num_fillers = num_cached * block_size // w["filler_tokens"]
        fillers = [self.request(f"cached{i}", [i + 1] * w["filler_tokens"], max_tokens=1) for i in range(num_fillers)]
        if head_tokens:
            fillers.append(self.request("first", list(range(head_tokens)), max_tokens=1))
        for request in fillers:
            scheduler.add(request)
        while scheduler.requests:
            self.step(scheduler)
        for i in range(w["num_running"]):
            token_ids = [i] * (w["running_tokens"] + i % block_size)
            scheduler.add(self.request(f"r{i}", token_ids, max_tokens=w["max_model_len"]))
        while len(scheduler.running) < w["num_running"] or not all(r.num_output_tokens for r in scheduler.running):
            self.step(scheduler)
        if head_tokens:
            more_than_free = [5] * (w["num_running"] * w["spare_blocks_per_request"] * block_size)
            scheduler.add(self.request("head", list(range(head_tokens)) + more_than_free))
        for i in range(num_waiting):
            scheduler.add(self.request(f"w{i}", [i] * 40))
        return scheduler

    def step(self, scheduler: Scheduler) -> tuple[float, float]:
        """Seconds of one `schedule` and of the `update` after it."""
        started = time.thread_time()
        step = scheduler.schedule()
        scheduled = time.thread_time()
        result = StepResult([7 if entry.samples else None for entry in step.scheduled])
        ready = time.thread_time()
        scheduler.update(step, result)
        return scheduled - started, time.thread_time() - ready

    def steps(self, num_waiting: int, num_cached: int, head_tokens: int) -> dict[str, float]:
        """Decode steps of `num_running` requests."""
        key = f"{num_waiting} {num_cached} {head_tokens}"
        if key not in self._schedulers:
            self._schedulers[key] = self.scheduler(num_waiting, num_cached, head_tokens)
        scheduler = self._schedulers[key]
        means_s = mean_of_steps(lambda: self.step(scheduler), self.block_size)
        assert len(scheduler.running) == self.w["num_running"]
        return means_s


if __name__ == "__main__":
    serve(Foreword)
