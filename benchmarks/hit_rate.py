"""Prefix hits by eviction policy and pool size, beside the offline optimum: public traces, replayed without a model.

    python -m benchmarks.hit_rate TRACES [--policies lru frequency] [--pools 1000 4000] [--max-num-seqs 1]
                                         [--tokenizer MODEL_DIR] [--out run.json]

TRACES is a folder with the traces by their public names (`*_trace.jsonl.gz`: Mooncake's, FAST'25; `lmcache_agent_*`:
LMCache's agent traces); nothing is downloaded. Requests go through the real scheduler, KV cache manager and block pool.

Traces of blocks: a block of the trace, 512 tokens, is one block of the pool, also the last of a prompt. One request
after another (the default), LRU must give the golden figures of the traces' README, or the program fails.
Traces of text: tokens of `--tokenizer` (default SmolLM2's), blocks of 16, prompts and answers, hits of whole blocks and
hits to the token.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.trace_replay import optimal_hits, read_jsonl, replay, requests_of_blocks, requests_of_text
from engine_core import resolve_model
from engine_core.config import EvictionPolicy, PrefixMatchUnit
from frontend.prompt.tokenizer import load_tokenizer

# Of the traces' README: blocks, distinct ones, and hits in percent with LRU by pool size.
GOLDEN: dict[str, tuple[int, int, dict[int, float]]] = {
    "conversation": (288_500, 182_790, {64_000: 35.9, 16_000: 26.3, 4_000: 8.7, 1_000: 4.5}),
    "synthetic": (121_877, 43_924, {64_000: 64.0, 16_000: 53.0, 4_000: 23.5, 1_000: 8.4}),
}
POOLS = (1_000, 4_000, 16_000, 64_000)
TEXT_BLOCK_TOKENS = 16
UNITS: tuple[PrefixMatchUnit, ...] = ("block", "token")


def block_trace_rows(
    path: Path, policies: Sequence[EvictionPolicy], pools: Sequence[int], max_num_seqs: int
) -> list[dict[str, Any]]:
    """A row for each pool size: hits in percent of all blocks. Raises SystemExit where LRU does not give the golden."""
    name = path.name.removeprefix("mooncake_").removesuffix("_trace.jsonl.gz")
    block_ids = [record["hash_ids"] for record in read_jsonl(path)]
    num_blocks, num_distinct = sum(map(len, block_ids)), len(set().union(*block_ids))
    golden = GOLDEN.get(name)
    if golden is not None and golden[:2] != (num_blocks, num_distinct):
        raise SystemExit(f"{path}: {num_blocks} blocks, {num_distinct} distinct, not {golden[:2]}")
    requests = requests_of_blocks(block_ids, 1)
    rows = []
    for pool in pools:
        row: dict[str, Any] = {"trace": name, "pool_blocks": pool}
        for policy in policies:
            totals = replay(requests, pool, 1, policy, max_num_seqs=max_num_seqs)
            row[policy] = 100 * totals.block_hit_rate
            print(f"{name} {pool:,} {policy} {row[policy]:.2f} %", file=sys.stderr)
        row["optimum"] = 100 * optimal_hits(block_ids, pool) / num_blocks
        expected = golden and golden[2].get(pool)
        if expected and "lru" in row and max_num_seqs == 1:
            row["golden"] = expected
            if abs(row["lru"] - expected) > 0.06:
                raise SystemExit(f"{name}, {pool} blocks, LRU: {row['lru']:.2f} % instead of {expected} %")
        rows.append(row)
    return rows


def text_trace_rows(
    path: Path, encode: Callable[[str], list[int]], policies: Sequence[EvictionPolicy], max_num_seqs: int
) -> list[dict[str, Any]]:
    """A row for each pool size and policy: hits in percent of prompt tokens, by the unit of a hit; and tokens."""
    requests = requests_of_text(read_jsonl(path), encode)
    name = path.name.removesuffix(".jsonl.gz")
    size = TEXT_BLOCK_TOKENS
    in_all = sum(-(-(len(request.prompt) + len(request.output)) // size) for request in requests)
    longest = max(-(-(len(request.prompt) + len(request.output)) // size) for request in requests)
    rows = []
    for pool in (longest, 2 * longest, 4 * longest, in_all):
        for policy in policies if pool < in_all else policies[:1]:
            row: dict[str, Any] = {"trace": name, "pool_blocks": pool, "policy": policy}
            for unit in UNITS:
                totals = replay(requests, pool, size, policy, match_unit=unit, max_num_seqs=max_num_seqs)
                row |= {
                    "prompt_tokens": totals.num_prompt_tokens,
                    f"{unit}_hits": 100 * totals.token_hit_rate,
                    f"{unit}_prefilled_tokens": totals.num_prefilled_tokens,
                }
            print(f"{name} {pool:,} {policy} {row['block_hits']:.2f} % {row['token_hits']:.2f} %", file=sys.stderr)
            rows.append(row)
    return rows


def print_block_table(rows: Sequence[dict[str, Any]], policies: Sequence[str]) -> None:
    print(f"| trace | blocks in the pool | {' | '.join(policies)} | offline optimum | golden LRU |")
    print("| --- " * (len(policies) + 4) + "|")
    for row in rows:
        golden = f"{row['golden']} %, met" if "golden" in row else ""
        hits = " | ".join(f"{row[policy]:.2f} %" for policy in policies)
        print(f"| {row['trace']} | {row['pool_blocks']:,} | {hits} | {row['optimum']:.2f} % | {golden} |")


def print_text_table(rows: Sequence[dict[str, Any]]) -> None:
    print("| trace | prompt tokens | blocks in the pool | policy | hits, blocks of 16 | hits, tokens | prefill saved |")
    print("| --- " * 7 + "|")
    for row in rows:
        saved = 1 - row["token_prefilled_tokens"] / row["block_prefilled_tokens"]
        print(
            f"| {row['trace']} | {row['prompt_tokens']:,} | {row['pool_blocks']:,} | {row['policy']} "
            f"| {row['block_hits']:.2f} % | {row['token_hits']:.2f} % "
            f"| {row['block_prefilled_tokens']:,} → {row['token_prefilled_tokens']:,} ({saved:.0%}) |"
        )


def load_encoder(directory: Path | None) -> Callable[[str], list[int]]:
    """From text to the ids of a model's tokenizer."""
    backend = load_tokenizer(directory or resolve_model("smollm2").path).backend
    return lambda text: list(backend.encode(text, add_special_tokens=False).ids)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, metavar="TRACES")
    parser.add_argument("--policies", nargs="+", default=["lru", "frequency"])
    parser.add_argument("--pools", nargs="+", type=int, default=POOLS, help="blocks, for the traces of blocks")
    parser.add_argument("--max-num-seqs", type=int, default=1)
    parser.add_argument("--tokenizer", type=Path, help="a model's directory (default: SmolLM2's)")
    parser.add_argument("--out", type=Path, help="write all rows as JSON")
    arguments = parser.parse_args()
    block_rows: list[dict[str, Any]] = []
    for path in sorted(arguments.traces.glob("*_trace.jsonl.gz")):
        block_rows += block_trace_rows(path, arguments.policies, arguments.pools, arguments.max_num_seqs)
    text_rows: list[dict[str, Any]] = []
    text_paths = sorted(arguments.traces.glob("lmcache_agent_*.jsonl.gz"))
    encode = load_encoder(arguments.tokenizer) if text_paths else None
    for path in text_paths:
        assert encode is not None
        text_rows += text_trace_rows(path, encode, arguments.policies, arguments.max_num_seqs)
    if block_rows:
        print_block_table(block_rows, arguments.policies)
    if text_rows:
        print_text_table(text_rows)
    if arguments.out:
        arguments.out.write_text(json.dumps({"blocks": block_rows, "texts": text_rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
