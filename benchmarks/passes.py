"""What each pass over the model buys: steps of engines that have all of them, all but one, and none.

    python -m benchmarks.passes [--dtype float32] [--rounds 5] [--rows 1,8] [--contexts 32,2048] [--prompts 256,1024]

The engines live in one process and are asked in turn, round after round. A figure is the median wall time of an
`EngineCore.step` in ms, with what it takes longer than with all passes. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.engine_bench import decoding, prefilling
from engine_core import EngineConfig, EngineCore, resolve_model

# The switches of `EngineConfig` that stand for a pass.
PASSES = ("fuse_layers", "prepack_weights", "linear_kernel")

BLOCK_SIZE = 16
STEPS_A_ROUND = 8


@dataclass(frozen=True, slots=True)
class Case:
    """`times_s` measures it on an engine; the number is that of the round."""

    name: str
    times_s: Callable[[EngineCore, int], list[float]]


def decode(num_rows: int, num_context_tokens: int) -> Case:
    def times_s(engine: EngineCore, number: int) -> list[float]:
        with decoding(engine, num_rows, num_context_tokens):
            return [step_s(engine) for _ in range(STEPS_A_ROUND)]

    return Case(f"{num_rows} decode{'s' * (num_rows > 1)} after {num_context_tokens:,}", times_s)


def prefill(num_tokens: int) -> Case:
    def times_s(engine: EngineCore, number: int) -> list[float]:
        with prefilling(engine, f"prefill-{num_tokens}-{number}", num_tokens):
            return [step_s(engine)]

    return Case(f"prefill of {num_tokens:,}", times_s)


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def step_s(engine: EngineCore) -> float:
    started_s = time.perf_counter()
    engine.step()
    return time.perf_counter() - started_s


def make_engines(passes: Sequence[str], settings: dict[str, Any]) -> dict[str, EngineCore]:
    """By what they are called in the table; the first has all passes. `settings` are those of `EngineConfig`."""
    variants: dict[str, dict[str, bool]] = {"all": {}}
    variants |= {f"without {name}": {name: False} for name in passes}
    variants["none"] = dict.fromkeys(passes, False)
    return {name: EngineCore(EngineConfig(**settings, **switches)) for name, switches in variants.items()}


def measure(engines: dict[str, EngineCore], cases: Sequence[Case], rounds: int) -> dict[str, dict[str, float]]:
    """Median seconds by case and engine."""
    times_s: dict[str, dict[str, list[float]]] = {case.name: defaultdict(list) for case in cases}
    names = list(engines)
    for number in range(-1, rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
        for place, case in enumerate(cases):
            first = (number + place) % len(names)
            # Nobody always follows the same one, whose weights it finds in the caches.
            for name in names[first:] + names[:first]:
                measured = case.times_s(engines[name], number)
                # The first round fills caches.
                if number >= 0:
                    times_s[case.name][name] += measured
    return {case: {name: statistics.median(of) for name, of in by_name.items()} for case, by_name in times_s.items()}


def table(measured: dict[str, dict[str, float]]) -> list[str]:
    """Markdown."""
    names = list(next(iter(measured.values())))
    lines = [f"| ms | {' | '.join(f'`{name}`' for name in names)} |", "| --- |" + " --- |" * len(names)]
    for case, medians_s in measured.items():
        best_s = medians_s[names[0]]
        cells = [f"{best_s * 1e3:.1f}"]
        cells += [f"{medians_s[name] * 1e3:.1f} ({medians_s[name] / best_s - 1:+.0%})" for name in names[1:]]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, help="default: as the engine decides")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", default="1,8", help="how many requests decode")
    parser.add_argument("--contexts", default="32,2048", help="after how many tokens")
    parser.add_argument("--prompts", default="256,1024", help="sizes of prefills")
    parser.add_argument("--passes", default=",".join(PASSES), help="those to switch off, with commas between them")
    arguments = parser.parse_args()
    rows, contexts, prompts = (numbers(text) for text in (arguments.rows, arguments.contexts, arguments.prompts))
    # Room for the prompts of all decodes, which are to stay in the cache, and for as many tokens that come and go.
    num_tokens = max(prompts) + sum(max(rows) * (context + STEPS_A_ROUND + BLOCK_SIZE) for context in contexts)
    settings = {
        "model": str(resolve_model(arguments.model).path),
        "dtype": arguments.dtype,
        "device": "cpu",
        "num_threads": arguments.threads,
        "block_size": BLOCK_SIZE,
        "num_blocks": 2 * num_tokens // BLOCK_SIZE,
        "max_num_batched_tokens": max(2048, *prompts),
        "max_num_seqs": max(rows),
        "max_model_len": max(*contexts, *prompts) + 2 * STEPS_A_ROUND,
    }
    cases = [decode(count, context) for count in rows for context in contexts] + [prefill(size) for size in prompts]
    engines = make_engines(arguments.passes.split(","), settings)
    print("\n".join(table(measure(engines, cases, arguments.rounds))))


if __name__ == "__main__":
    main()
