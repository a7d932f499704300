"""What both halves of `benchmarks.bookkeeping` share: how to time, and how to answer the benchmark.

One line each way. In: the workload, a JSON object; out: `null` when ready. Then in: `[method, [arguments…]]` of the
object that measures; out: what it returns, seconds by name.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any


def seconds(function: Callable[..., Any], *arguments: Any) -> float:
    """CPU time of one call, whatever else the machine does, with the garbage collector off as `timeit` has it."""
    gc.disable()
    started = time.thread_time()
    function(*arguments)
    elapsed_s = time.thread_time() - started
    gc.enable()
    return elapsed_s


def random_token_ids(w: dict[str, Any], seed: int) -> list[int]:
    """A prompt of the workload; the same one for the same seed on both sides."""
    return random.Random(seed).choices(range(w["vocab_size"]), k=w["prompt_tokens"])


class Timings:
    """Collects times under names."""

    def __init__(self) -> None:
        self._times_s: dict[str, list[float]] = {}

    def time(self, name: str, function: Callable[..., Any], *arguments: Any) -> None:
        self._times_s.setdefault(name, []).append(seconds(function, *arguments))

    def medians_s(self) -> dict[str, float]:
        return {name: statistics.median(times_s) for name, times_s in self._times_s.items()}


def mean_of_steps(step: Callable[[], tuple[float, float]], num_steps: int) -> dict[str, float]:
    """Mean seconds of the `schedule` and the `update` that `step` times, and of both, over consecutive steps."""
    gc.disable()
    measured = [step() for _ in range(num_steps)]
    gc.enable()
    schedule_s, update_s = (sum(times) / num_steps for times in zip(*measured))
    return {"schedule": schedule_s, "update": update_s, "step": schedule_s + update_s}


def serve(make_measurements: Callable[[dict[str, Any]], object]) -> None:
    """Answer the benchmark on standard input and output until it hangs up."""
    # Libraries that print must not write into the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    measurements = make_measurements(json.loads(sys.stdin.readline()))
    print("null", file=answers, flush=True)
    for line in sys.stdin:
        method, arguments = json.loads(line)
        print(json.dumps(getattr(measurements, method)(*arguments)), file=answers, flush=True)
