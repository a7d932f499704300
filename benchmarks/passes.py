"""What each pass over the model buys: steps of engines that have all of them, all but one, and none.

    python -m benchmarks.passes [--dtype float32] [--threads 2] [--rounds 5]

The engines live in one process and are asked in turn, round after round. A figure is the median wall time of an
`EngineCore.step` in ms, with what it takes longer than with all passes. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.engine_bench import decoding, prefilling
from engine_core import EngineConfig, EngineCore, resolve_model

# The switches of `EngineConfig` that stand for a pass.
PASSES = ("merge_projections", "prepack_weights", "linear_kernel")

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


def step_s(engine: EngineCore) -> float:
    started_s = time.perf_counter()
    engine.step()
    return time.perf_counter() - started_s


CASES = (decode(1, 32), decode(1, 2048), decode(8, 32), decode(8, 2048), prefill(256), prefill(1024))


def make_engines(model: str, dtype: str, threads: int | None, passes: tuple[str, ...]) -> dict[str, EngineCore]:
    """By what they are called in the table; the first has all passes."""
    variants: dict[str, dict[str, bool]] = {"all": {}}
    variants |= {f"without {name}": {name: False} for name in passes}
    variants["none"] = dict.fromkeys(passes, False)
    num_blocks = 2 * (2048 + BLOCK_SIZE) * 8 // BLOCK_SIZE
    settings = {"model": model, "dtype": dtype, "device": "cpu", "num_threads": threads, "num_blocks": num_blocks}
    settings |= {"block_size": BLOCK_SIZE, "max_num_batched_tokens": 2048, "max_model_len": 4096}
    return {name: EngineCore(EngineConfig(**settings, **switches)) for name, switches in variants.items()}


def measure(engines: dict[str, EngineCore], rounds: int) -> dict[str, dict[str, float]]:
    """Median seconds by case and engine."""
    times_s: dict[str, dict[str, list[float]]] = {case.name: defaultdict(list) for case in CASES}
    for number in range(-1, rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
        for case in CASES:
            for name, engine in engines.items():
                measured = case.times_s(engine, number)
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
    parser.add_argument("--passes", default=",".join(PASSES), help="those to switch off, with commas between them")
    arguments = parser.parse_args()
    passes = tuple(arguments.passes.split(","))
    model = str(resolve_model(arguments.model).path)
    engines = make_engines(model, arguments.dtype, arguments.threads, passes)
    print("\n".join(table(measure(engines, arguments.rounds))))


if __name__ == "__main__":
    main()
