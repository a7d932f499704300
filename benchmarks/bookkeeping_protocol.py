"""What both halves of `benchmarks.bookkeeping` share: how to time, and how to answer the benchmark.

One line each way. In: the workload, a JSON object; out: `null` when ready. Then in: `[method, [arguments…]]` of the
object that measures; out: the seconds it returns.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


def seconds(function: Callable[[], Any]) -> float:
    """What one call takes, with the garbage collector off, as `timeit` does it."""
    gc.collect()
    gc.disable()
    started = time.perf_counter()
    function()
    elapsed_s = time.perf_counter() - started
    gc.enable()
    return elapsed_s


def mean_of_steps(step: Callable[[], tuple[float, float]], num_steps: int, part: str) -> float:
    """Mean seconds of the `schedule`, the `update` or `both` that `step` times, over consecutive steps."""
    gc.collect()
    gc.disable()
    measured = [step() for _ in range(num_steps)]
    gc.enable()
    schedule_s, update_s = (sum(times) / num_steps for times in zip(*measured))
    return {"schedule": schedule_s, "update": update_s, "both": schedule_s + update_s}[part]


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
