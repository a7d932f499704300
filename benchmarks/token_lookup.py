"""What it costs to look for hits to the token, beside whole blocks only: lookups of long prompts, no model.

    python -m benchmarks.token_lookup [--prompt-tokens 8192] [--others 0 100 10000] [--rounds 200]

The prompt goes on in the middle of a block that a finished request left behind, among the tails of `--others` more
under the same prefix. Both units look it up in turn, in one process and one thread; figures are medians of CPU time.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import get_args

from engine_core.config import PrefixMatchUnit
from engine_core.kv_cache import BlockHasher, KVCacheManager
from engine_core.request import Request
from ipc.vocabulary import EngineRequest, SamplingParams

BLOCK_SIZE = 16
VOCAB_SIZE = 150_000
TAIL_TOKENS = 9


def make_request(name: str, token_ids: list[int], hasher: BlockHasher) -> Request:
    request = Request(EngineRequest(name, token_ids, SamplingParams()), max_tokens=1, seed=0, arrival_time_s=0.0)
    hasher.extend(request)
    return request


def compute(manager: KVCacheManager, request: Request) -> None:
    """Leave all of it in the cache."""
    hit = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, request.num_tokens - hit.num_tokens, hit) is not None
    manager.commit_step()
    request.num_computed_tokens = request.num_tokens
    manager.free(request)


def lookups_s(num_prompt_tokens: int, num_others: int, num_rounds: int) -> dict[PrefixMatchUnit, list[float]]:
    """CPU seconds of each lookup, by unit."""
    rng = random.Random(0)
    hasher = BlockHasher("sha256", BLOCK_SIZE)
    manager = KVCacheManager(num_prompt_tokens // BLOCK_SIZE + num_others + 2, BLOCK_SIZE)
    prefix = [rng.randrange(VOCAB_SIZE) for _ in range(num_prompt_tokens // BLOCK_SIZE * BLOCK_SIZE)]
    tail = [rng.randrange(VOCAB_SIZE) for _ in range(TAIL_TOKENS)]
    compute(manager, make_request("first", prefix + tail, hasher))
    for number in range(num_others):
        others = [rng.randrange(VOCAB_SIZE) for _ in range(TAIL_TOKENS)]
        compute(manager, make_request(f"other {number}", prefix + others, hasher))
    request = make_request("looked up", prefix + tail + [1, 2, 3], hasher)
    times_s: dict[PrefixMatchUnit, list[float]] = {unit: [] for unit in get_args(PrefixMatchUnit)}
    for _ in range(num_rounds):
        for unit, unit_times_s in times_s.items():
            manager.match_unit = unit
            started_s = time.process_time()
            hit = manager.get_computed_blocks(request)
            unit_times_s.append(time.process_time() - started_s)
            assert hit.num_tokens == len(prefix) + (TAIL_TOKENS if unit == "token" else 0)
    return times_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--others", type=int, nargs="+", default=[0, 100, 10_000])
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    print("| tails under the prefix | whole blocks, µs | to the token, µs | ratio |\n| --- | --- | --- | --- |")
    for num_others in arguments.others:
        times_s = lookups_s(arguments.prompt_tokens, num_others, arguments.rounds)
        block_us, token_us = (1e6 * statistics.median(times_s[unit]) for unit in ("block", "token"))
        print(f"| {num_others + 1:,} | {block_us:.1f} | {token_us:.1f} | {token_us / block_us:.2f} |")


if __name__ == "__main__":
    main()
