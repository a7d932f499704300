"""What choosing tokens costs on a CPU, in C beside torch: `python -m benchmarks.sampling_on_cpu`.

Logits are normal numbers, threads are torch's (`OMP_NUM_THREADS`). Both sides alternate, and must choose the same
tokens; medians of all rounds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median

import torch

from kernels.dispatch import computed_by, library_for
from kernels.restrict import Restrictions
from kernels.sample_tokens import Randomness, sample_tokens
from kernels.token_logprobs import token_logprobs

# Temperature, top_k, top_p, min_p.
SETTINGS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature 0.8": (0.8, 0, 1.0, 0.0),
    "…, top_p 0.95": (0.8, 0, 0.95, 0.0),
    "…, top_k 50": (0.8, 50, 1.0, 0.0),
    "…, min_p 0.05": (0.8, 0, 1.0, 0.05),
    "temperature 5, top_p 0.95": (5.0, 0, 0.95, 0.0),
}


def cases(logits: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    num_rows = len(logits)
    seeds = torch.arange(num_rows)

    def sampling(temperature: float, top_k: int, top_p: float, min_p: float) -> Callable[[], torch.Tensor]:
        if not temperature:
            return lambda: sample_tokens(logits)
        randomness = Randomness(torch.full((num_rows,), temperature), seeds, seeds)
        if (top_k, top_p, min_p) == (0, 1.0, 0.0):
            return lambda: sample_tokens(logits, randomness)
        restrictions = Restrictions(
            torch.full((num_rows,), top_k),
            torch.full((num_rows,), top_p, dtype=torch.float64),
            torch.full((num_rows,), min_p, dtype=torch.float64),
        )
        return lambda: sample_tokens(logits, randomness, restrictions)

    greedy = sample_tokens(logits)
    works = {name: sampling(*setting) for name, setting in SETTINGS.items()}
    return works | {"logprobs=5": lambda: token_logprobs(logits, greedy, 5).top_ids}


def medians_us(work: Callable[[], torch.Tensor], rounds: int) -> tuple[float, float]:
    """In torch, and in C."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 1):
        start = time.perf_counter()
        with computed_by("torch"):
            expected = work()
        middle = time.perf_counter()
        tokens = work()
        end = time.perf_counter()
        if not torch.equal(tokens, expected):
            raise RuntimeError("C and torch have chosen different tokens")
        times[0].append(middle - start)
        times[1].append(end - middle)
    # The first round finds nothing prepared.
    return median(times[0][1:]) * 1e6, median(times[1][1:]) * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab-sizes", type=int, nargs="+", default=[49_152, 151_936])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=21)
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    if library_for(torch.empty(0, dtype=dtype)) is None:
        print("the C kernels were not built", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    print(f"{arguments.dtype}, {torch.get_num_threads()} threads, µs: torch → C\n")
    shapes = [(rows, vocab_size) for vocab_size in arguments.vocab_sizes for rows in arguments.rows]
    print("| |", " | ".join(f"{rows} × {vocab_size:,}" for rows, vocab_size in shapes), "|")
    print("| --- |" + " --- |" * len(shapes))
    works = [cases((torch.randn(shape) * 3).to(dtype)) for shape in shapes]
    for name in works[0]:
        measured = [medians_us(work[name], arguments.rounds) for work in works]
        print(
            f"| {name} |", " | ".join(f"{torch_us:,.0f} → {c_us:,.0f}" for torch_us, c_us in measured), "|", flush=True
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
