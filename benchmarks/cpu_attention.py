"""Attention over the paged cache on this CPU, beside what its memory reads and what torch's own attention takes.

    python -m benchmarks.cpu_attention [--threads N] [--dtype bfloat16|float32] [--kv-cache-dtype int8|fp8_e4m3]

Decodes in GB/s of keys and values read, beside what the same threads read of a large array; chunks of 512 tokens
behind cached ones beside `scaled_dot_product_attention` of contiguous keys and values; 16 decodes that share a prefix
beside 16 that do not. Requests lie in scattered blocks. One layer; sizes are SmolLM2-135M's unless given.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from kernels.attention import attention, is_available
from kernels.attention_metadata import AttentionMetadata
from kernels.attention_tiles import LayerHeads
from kernels.quantize_kv import QUANTIZED_TYPES, KVScales

_BLOCK_SIZE = 16
# More than any cache holds, so that each call's keys come from memory.
_COLD_BYTES = 256 << 20
_SHARED_TOKENS = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--kv-cache-dtype", choices=("auto", *QUANTIZED_TYPES), default="auto")
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=0.5, help="how long each figure is measured at least")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    heads = LayerHeads(args.heads, args.kv_heads, args.head_dim, args.head_dim, getattr(torch, args.dtype))
    if not is_available(heads.dtype):
        parser.error("the attention kernel was not built for this CPU")
    with torch.inference_mode():
        measure(heads, QUANTIZED_TYPES.get(args.kv_cache_dtype), args.seconds)


def measure(heads: LayerHeads, quantized: torch.dtype | None, seconds: float) -> None:
    bandwidth = read_bandwidth(seconds)
    print(f"{torch.get_num_threads()} threads read {bandwidth / 1e9:.1f} GB/s\n")

    print("| decodes | keys each | laid out, µs | ms | GB/s | of the memory's |")
    print("| --- | --- | --- | --- | --- | --- |")
    for num_requests in (1, 8, 16):
        for num_keys in (512, 2048, 4096, 16384):
            step = Step(heads, quantized, [(1, num_keys)] * num_requests)
            planning_s, step_s = step.planning_s(seconds / 4), step.seconds(seconds)
            rate = num_requests * num_keys * step.token_bytes / step_s
            print(
                f"| {num_requests} | {num_keys:,} | {planning_s * 1e6:.0f} | {step_s * 1e3:.3f} | {rate / 1e9:.1f} |"
                f" {rate / bandwidth:.0%} |"
            )

    print("\n| chunk of 512 behind | ms | torch's, contiguous, ms | ratio |")
    print("| --- | --- | --- | --- |")
    for num_cached in (0, 2048, 4096):
        step_s = Step(heads, quantized, [(512, num_cached + 512)]).seconds(seconds)
        torch_s = contiguous_attention_s(heads, 512, num_cached + 512, seconds)
        print(f"| {num_cached:,} | {step_s * 1e3:.2f} | {torch_s * 1e3:.2f} | {step_s / torch_s:.2f} |")

    print(f"\n| 16 decodes, {_SHARED_TOKENS:,} + 32 tokens | laid out, µs | ms | ratio |")
    print("| --- | --- | --- | --- |")
    apart = Step(heads, quantized, [(1, _SHARED_TOKENS + 32)] * 16)
    shared = Step(heads, quantized, [(1, _SHARED_TOKENS + 32)] * 16, num_shared=_SHARED_TOKENS)
    apart_s, shared_s = apart.seconds(seconds), shared.seconds(seconds)
    print(f"| nothing shared | {apart.planning_s(seconds / 4) * 1e6:.0f} | {apart_s * 1e3:.2f} | 1 |")
    print(f"| shared | {shared.planning_s(seconds / 4) * 1e6:.0f} | {shared_s * 1e3:.2f} | {shared_s / apart_s:.2f} |")


class Step:
    """A step of `(query_len, seq_len)`, the first `num_shared` tokens of all the same, in as many layers' caches as no
    processor's cache holds: each call is of the next layer. `quantized` is the caches' type where it is not `heads`'.
    """

    def __init__(
        self, heads: LayerHeads, quantized: torch.dtype | None, lengths: list[tuple[int, int]], num_shared: int = 0
    ) -> None:
        self.heads = heads
        self.query_lens, self.seq_lens = (np.array(column) for column in zip(*lengths, strict=True))
        num_blocks = -(-int(self.seq_lens.max()) // _BLOCK_SIZE)
        shuffled = np.random.default_rng(0).permutation(len(lengths) * num_blocks)
        self.block_tables = shuffled.reshape(len(lengths), num_blocks)
        self.block_tables[:, : num_shared // _BLOCK_SIZE] = self.block_tables[0, : num_shared // _BLOCK_SIZE]
        head_bytes = heads.head_dim * heads.dtype.itemsize if quantized is None else heads.head_dim + 4
        self.token_bytes = 2 * heads.num_kv_heads * head_bytes
        num_layers = max(1, _COLD_BYTES // (len(shuffled) * _BLOCK_SIZE * self.token_bytes)) + 1
        shape = (num_layers, 2, len(shuffled), _BLOCK_SIZE, heads.num_kv_heads, heads.head_dim)
        if quantized is None:
            self.caches = torch.empty(shape, dtype=heads.dtype).normal_()
            self.scales: list[KVScales | None] = [None] * num_layers
        else:
            # Of any content: it takes as long.
            self.caches = torch.randint(120, shape, dtype=torch.uint8).view(quantized)
            self.scales = [KVScales(*both) for both in torch.rand(shape[:-1])]
        self.query = torch.randn(int(self.query_lens.sum()), heads.num_heads, heads.head_dim).to(heads.dtype)
        self.calls = 0

    def metadata(self) -> AttentionMetadata:
        return AttentionMetadata(
            query_start_loc=np.concatenate([[0], np.cumsum(self.query_lens)]),
            seq_lens=self.seq_lens,
            block_tables=self.block_tables,
            slot_mapping=np.full(len(self.query), -1),
            block_size=_BLOCK_SIZE,
            dtype=self.heads.dtype,
            device=torch.device("cpu"),
        )

    def planning_s(self, seconds: float) -> float:
        metadata = self.metadata()

        def plan() -> None:
            metadata._cpu_batches.clear()
            metadata.cpu_batch(self.heads, None)

        return median_s(plan, seconds)

    def seconds(self, seconds: float) -> float:
        batch = self.metadata().cpu_batch(self.heads, None)

        def call() -> None:
            keys, values = self.caches[self.calls % len(self.caches)]
            scales = self.scales[self.calls % len(self.caches)]
            self.calls += 1
            attention(self.query, keys, values, batch, scales, scaling=self.heads.head_dim**-0.5)

        return median_s(call, seconds)


def contiguous_attention_s(heads: LayerHeads, num_queries: int, num_keys: int, seconds: float) -> float:
    """torch's own, of one request whose keys and values lie as it likes them."""
    query = torch.randn(1, heads.num_heads, num_queries, heads.head_dim).to(heads.dtype)
    keys, values = (torch.randn(1, heads.num_kv_heads, num_keys, heads.head_dim).to(heads.dtype) for _ in range(2))
    mask = torch.full((num_queries, num_keys), float("-inf"), dtype=heads.dtype).triu(1 + num_keys - num_queries)
    options = {"is_causal": True} if num_queries == num_keys else {"attn_mask": mask}

    def call() -> None:
        F.scaled_dot_product_attention(query, keys, values, enable_gqa=True, **options)  # type: ignore[arg-type]

    return median_s(call, seconds)


def read_bandwidth(seconds: float) -> float:
    """Bytes per second that torch's threads read together."""
    numbers = torch.ones(_COLD_BYTES // 8, dtype=torch.int64)
    return numbers.nbytes / median_s(numbers.sum, seconds)


def median_s(call: Callable[[], object], seconds: float) -> float:
    call()
    times: list[float] = []
    while sum(times) < seconds or len(times) < 5:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


if __name__ == "__main__":
    main()
