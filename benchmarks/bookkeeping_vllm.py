"""The peer's half of `benchmarks.bookkeeping`: the same measurements of vLLM's own classes, no model loaded.

Started by that benchmark, as a script, with an interpreter that has vLLM: our packages must not be on its path.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from bookkeeping_protocol import Timings, mean_of_steps, random_token_ids, seconds, serve
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256, sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, hash_block_tokens, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

HASH_FUNCTIONS = {"sha256": sha256, "sha256_cbor": sha256_cbor}
# A Llama nobody has: the scheduler wants a model's configuration, not its weights.
MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "torch_dtype": "float32",
}


class VLLM:
    """Measurements by name. `w` is the workload; see `benchmarks.bookkeeping.WORKLOAD`."""

    def __init__(self, w: dict[str, Any]) -> None:
        self.w = w
        self.block_size: int = w["block_size"]
        self.num_prompt_blocks: int = w["prompt_tokens"] // self.block_size
        self._schedulers: dict[str, Scheduler] = {}

    def request(self, name: str, token_ids: list[int], algo: str = "sha256", max_tokens: int = 16) -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        params.update_from_generation_config({}, None)
        hasher = get_request_block_hasher(self.block_size, HASH_FUNCTIONS[algo])
        return Request(name, token_ids, params, None, arrival_time=0.0, block_hasher=hasher)

    def kv_cache_config(self, num_blocks: int) -> KVCacheConfig:
        spec = FullAttentionSpec(block_size=self.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        return KVCacheConfig(num_blocks + 1, [], [KVCacheGroupSpec(["layer"], spec)])

    def manager(self, num_blocks: int) -> KVCacheManager:
        return KVCacheManager(
            self.kv_cache_config(num_blocks),
            max_model_len=self.w["max_model_len"],
            scheduler_block_size=self.block_size,
            hash_block_size=self.block_size,
        )

    def hashing(self, algo: str) -> dict[str, float]:
        """Per block of a prompt, from its token ids to the list of hashes; `bare`: the function that hashes a block."""
        function = HASH_FUNCTIONS[algo]
        hasher = get_request_block_hasher(self.block_size, function)
        timings = Timings()

        def hash_each(blocks: list[list[int]]) -> None:
            parent = None
            for block in blocks:
                parent = hash_block_tokens(function, parent, block, None)

        for index in range(self.w["num_prompts"]):
            token_ids = random_token_ids(self.w, seed=index)
            request = self.request("r", token_ids, algo)
            request.block_hashes = []
            timings.time("prompt", hasher, request)
            starts = range(0, len(token_ids), self.block_size)
            timings.time("bare", hash_each, [token_ids[start : start + self.block_size] for start in starts])
        return {name: median_s / self.num_prompt_blocks for name, median_s in timings.medians_s().items()}

    def prompts(self) -> dict[str, float]:
        """Whole prompts, unknown to the cache and then known to it; the later half of them evict former ones."""
        num_prompts = self.w["num_prompts"]
        manager = self.manager(num_prompts // 2 * self.num_prompt_blocks)
        timings = Timings()
        hit: Any = None
        allocated: Any = None

        def lookup() -> None:
            nonlocal hit
            hit = manager.get_computed_blocks(request)

        def allocate() -> None:
            nonlocal allocated
            blocks, num_tokens, _ = hit
            allocated = manager.allocate_slots(request, request.num_tokens - num_tokens, num_tokens, blocks)

        for index in range(num_prompts):
            token_ids = random_token_ids(self.w, seed=index)
            request = self.request("cold", token_ids)
            timings.time("lookup_miss", lookup)
            timings.time("allocate_free" if index < num_prompts // 2 else "allocate_evict", allocate)
            assert hit[1] == 0 and allocated is not None
            timings.time("free", manager.free, request)
            request = self.request("warm", token_ids)
            timings.time("lookup_hit", lookup)
            timings.time("allocate_hit", allocate)
            assert hit[1] == self.w["prompt_tokens"] - self.block_size and allocated is not None
            timings.time("free_hit", manager.free, request)
        return timings.medians_s()

    def decode_append(self) -> dict[str, float]:
        """Per request and token: append what was sampled, hash the block it fills, allocate the next step's slot."""
        num_requests = self.w["num_running"]
        manager = self.manager(num_requests * 8)
        requests = [self.request(f"r{i}", [i] * (32 + i % self.block_size)) for i in range(num_requests)]
        for request in requests:
            manager.allocate_slots(request, request.num_tokens)
            request.num_computed_tokens = request.num_tokens

        def steps() -> None:
            for _ in range(self.block_size):
                for request in requests:
                    request.append_output_token_ids(7)
                    manager.allocate_slots(request, 1)
                    request.num_computed_tokens += 1

        return {"token": seconds(steps) / num_requests / self.block_size}

    def config(self, max_num_seqs: int) -> VllmConfig:
        w = self.w
        model = MODEL_CONFIG | {"vocab_size": w["vocab_size"], "max_position_embeddings": w["max_model_len"]}
        with tempfile.TemporaryDirectory() as path:
            (Path(path) / "config.json").write_text(json.dumps(model))
            return VllmConfig(
                model_config=ModelConfig(path, skip_tokenizer_init=True, dtype="float32"),
                cache_config=CacheConfig(block_size=self.block_size, enable_prefix_caching=True),
                scheduler_config=SchedulerConfig(
                    max_num_seqs=max_num_seqs,
                    max_num_batched_tokens=w["max_num_batched_tokens"],
                    max_model_len=w["max_model_len"],
                    is_encoder_decoder=False,
                    enable_chunked_prefill=True,
                    async_scheduling=False,
                ),
            )

    def scheduler(self, num_waiting: int, num_cached: int, head_tokens: int) -> Scheduler:
        """`num_running` requests decoding, `num_waiting` that wait for a seat, `num_cached` hashes nobody uses.

        With `head_tokens` there is a seat, and a prompt of that many cached tokens waits for a block to become free.
        """
        w, block_size = self.w, self.block_size
        num_blocks = w["num_running"] * (w["running_tokens"] // block_size + w["spare_blocks_per_request"])
        num_blocks += num_cached + head_tokens // block_size
        config = self.config(max_num_seqs=w["num_running"] + bool(head_tokens))
        config.cache_config.num_gpu_blocks = num_blocks + 1
        scheduler = Scheduler(
            config, self.kv_cache_config(num_blocks), StructuredOutputManager(config), block_size=block_size
        )
        num_fillers = num_cached * block_size // w["filler_tokens"]
        fillers = [self.request(f"cached{i}", [i + 1] * w["filler_tokens"], max_tokens=1) for i in range(num_fillers)]
        if head_tokens:
            fillers.append(self.request("first", list(range(head_tokens)), max_tokens=1))
        for request in fillers:
            scheduler.add_request(request)
        while scheduler.has_unfinished_requests():
            self.step(scheduler)
        for i in range(w["num_running"]):
            token_ids = [i] * (w["running_tokens"] + i % block_size)
            scheduler.add_request(self.request(f"r{i}", token_ids, max_tokens=w["max_model_len"]))
        while len(scheduler.running) < w["num_running"] or any(r.num_output_tokens == 0 for r in scheduler.running):
            self.step(scheduler)
        if head_tokens:
            more_than_free = [5] * (w["num_running"] * w["spare_blocks_per_request"] * block_size)
            scheduler.add_request(self.request("head", list(range(head_tokens)) + more_than_free))
        for i in range(num_waiting):
            scheduler.add_request(self.request(f"w{i}", [i] * 40))
        return scheduler

    def step(self, scheduler: Scheduler) -> tuple[float, float]:
        """Seconds of one `schedule` and of the `update_from_output` after it."""
        started = time.thread_time()
        scheduled = scheduler.schedule()
        scheduled_at = time.thread_time()
        names = list(scheduled.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = scheduler.requests[name]
            sampled.append([7] if request.num_computed_tokens >= request.num_tokens else [])
        output = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)
        ready_at = time.thread_time()
        scheduler.update_from_output(scheduled, output)
        return scheduled_at - started, time.thread_time() - ready_at

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
    init_none_hash(sha256)
    serve(VLLM)
