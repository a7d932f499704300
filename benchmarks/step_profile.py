"""Where the time of an `EngineCore.step` goes: the model, sampling, and what is around them.

    python -m benchmarks.step_profile [--rows 1,8,64] [--top-p 0.9] [--context 64]

The functions that stand for a stage are replaced by ones that look at the clock before and after; a stage's time is
without that of stages within it, and what no stage covers is `rest`. What the clocks cost is measured too, and said: it
is part of the figures. Medians of wall times in µs over steps that decode; nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from benchmarks.engine_bench import decoding
from engine_core import EngineConfig, EngineCore, SamplingParams, resolve_model
from engine_core.model import runner
from engine_core.model.logit_rules import LogitRules
from engine_core.model.step_outputs import RunningStep
from engine_core.scheduler import Scheduler

# Where functions are looked up, their names there, and the stages they stand for.
STAGES: tuple[tuple[Any, str, str], ...] = (
    (Scheduler, "schedule", "schedule"),
    (runner, "lay_out", "lay out"),
    (runner, "build_input_batch", "inputs"),
    (LogitRules, "apply", "logit rules"),
    (runner, "sample", "sampling"),
    (runner, "add_sampled_logprobs", "outputs"),
    (RunningStep, "wait", "outputs"),
    (Scheduler, "update", "update"),
)
BLOCK_SIZE = 16
MODEL, REST = "model", "rest"
# The work itself; all else is around it.
KERNELS = (MODEL, "sampling")


class Clock:
    """Adds up the time of each stage, less that of the stages within it. Seconds."""

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._now_s = now_s
        self.times_s: Counter[str] = Counter()
        self.num_calls = 0
        self._within_s = [0.0]

    def timed(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._within_s.append(0.0)
            started_s = self._now_s()
            try:
                return function(*args, **kwargs)
            finally:
                took_s = self._now_s() - started_s
                self.times_s[stage] += took_s - self._within_s.pop()
                self._within_s[-1] += took_s
                self.num_calls += 1

        return call

    def read(self) -> tuple[dict[str, float], int]:
        """Times by stage and the number of calls since the last time."""
        taken = dict(self.times_s), self.num_calls
        self.times_s.clear()
        self.num_calls = 0
        return taken


def instrument(engine: EngineCore, clock: Clock) -> None:
    """From now on the stages are timed, for all engines of this process; the model for this one."""
    for holder, name, stage in STAGES:
        setattr(holder, name, clock.timed(getattr(holder, name), stage))
    model: Any = engine.runner._model  # type: ignore[attr-defined]
    model.forward = clock.timed(model.forward, MODEL)
    engine.step = clock.timed(engine.step, REST)  # type: ignore[method-assign]


def cost_of_a_call_s() -> float:
    """What it adds to a function that it is timed."""
    clock = Clock()
    timed = clock.timed(lambda: None, "nothing")
    num_calls = 20_000
    started_s = time.perf_counter()
    for _ in range(num_calls):
        timed()
    return (time.perf_counter() - started_s) / num_calls


def profile(engine: EngineCore, clock: Clock, num_rows: int, context: int, params: SamplingParams, steps: int) -> None:
    """Print a row of the table."""
    samples: list[dict[str, float]] = []
    num_calls = 0
    with decoding(engine, num_rows, context, params):
        for number in range(-5, steps):
            clock.read()
            engine.step()
            times_s, num_calls = clock.read()
            if number >= 0:
                samples.append(times_s)
    medians_s = {stage: statistics.median(sample.get(stage, 0.0) for sample in samples) for stage in columns()}
    whole_s = statistics.median(sum(sample.values()) for sample in samples)
    around_s = statistics.median(
        sum(took_s for stage, took_s in sample.items() if stage not in KERNELS) for sample in samples
    )
    figures = " | ".join(f"{medians_s[stage] * 1e6:,.0f}" for stage in columns())
    instrument_s = num_calls * cost_of_a_call_s()
    print(
        f"| {num_rows} | {figures} | {whole_s * 1e6:,.0f} | {around_s * 1e6:,.0f} ({around_s / whole_s:.1%})"
        f" | {instrument_s * 1e6:.0f} |",
        flush=True,
    )


def columns() -> list[str]:
    return list(dict.fromkeys([*(stage for _, _, stage in STAGES), MODEL, REST]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, help="default: as the engine decides")
    parser.add_argument("--rows", default="1,8,64", help="how many requests decode, with commas between")
    parser.add_argument("--context", type=int, default=64, help="tokens before the first step")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--top-p", type=float, help="sample with it; default: greedy")
    arguments = parser.parse_args()
    rows = [int(count) for count in arguments.rows.split(",")]
    params = SamplingParams(temperature=0.0)
    if arguments.top_p is not None:
        params = SamplingParams(temperature=0.8, top_p=arguments.top_p)
    num_tokens = arguments.context + arguments.steps + 64
    engine = EngineCore(
        EngineConfig(
            model=str(resolve_model(arguments.model).path),
            dtype=arguments.dtype,
            num_threads=arguments.threads,
            max_num_seqs=max(rows),
            max_model_len=num_tokens,
            block_size=BLOCK_SIZE,
            num_blocks=max(rows) * (num_tokens // BLOCK_SIZE + 1),
        )
    )
    clock = Clock()
    instrument(engine, clock)
    print(f"| decodes | {' | '.join(columns())} | step | around model and sampling | clocks |")
    print("| --- |" + " --- |" * (len(columns()) + 3))
    for num_rows in rows:
        profile(engine, clock, num_rows, arguments.context, params, arguments.steps)


if __name__ == "__main__":
    main()
