"""One case after the other, whatever becomes of the one before."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.gpu_check.case import Case, Setting, Work
from benchmarks.gpu_check.cases import CASES
from benchmarks.gpu_check.report import Result, describe_machine, save_json, table_head, table_row
from benchmarks.gpu_check.timing import Roofline, Stopwatch, measure_roofline
from kernels.dispatch import computed_by


def run_all(names: Sequence[str], *, is_rehearsal: bool, limit_s: float, json_path: Path | None) -> int:
    """Run the cases of `CASES` with these names, print the table, save the JSON. Returns the exit code."""
    start = time.monotonic()
    torch.set_float32_matmul_precision("highest")
    setting = Setting(torch.device("cpu" if is_rehearsal else "cuda"), is_rehearsal)
    print(", ".join(f"{name} {value}" for name, value in describe_machine().items()))
    stopwatch = roofline = None
    if not is_rehearsal:
        stopwatch = Stopwatch()
        roofline = measure_roofline(stopwatch)
        print(f"copies {roofline.bytes_per_s / 1e9:,.0f} GB/s, multiplies {roofline.flops_per_s / 1e12:,.0f} TFLOP/s")
    print(f"\n{table_head()}")
    results = []
    for result in run_cases(names, setting, stopwatch, roofline, start + limit_s):
        results.append(result)
        print(table_row(result), flush=True)
    wall_s = time.monotonic() - start
    for result in results:
        if result.reason is not None:
            print(f"{result.kernel}, {result.case}: {result.outcome}: {result.reason}", file=sys.stderr)
    print(f"\n{len(results)} cases in {wall_s:.0f} s")
    if json_path is not None:
        save_json(json_path, roofline, results, wall_s)
    return 0 if all(result.outcome == "ok" for result in results) else 1


def run_cases(
    names: Sequence[str], setting: Setting, stopwatch: Stopwatch | None, roofline: Roofline | None, end: float
) -> Iterator[Result]:
    """Each case's result as soon as it is there. None begins after `end`, in `time.monotonic()`."""
    stopped_by = None
    for name in names:
        for case in CASES[name](setting):
            if stopped_by is None and time.monotonic() > end:
                stopped_by = "the time was over (--limit-s)"
            if stopped_by is not None:
                yield Result(name, case.name, "left out", reason=stopped_by)
                continue
            try:
                with torch.inference_mode(), computed_by("triton"):
                    result = _result(name, case, stopwatch, roofline)
            except Exception as error:
                traceback.print_exc()
                result = Result(name, case.name, "failed", reason=f"{type(error).__name__}: {error}")
                if not _is_alive(setting.device):
                    stopped_by = f"the GPU failed in {name}, {case.name}"
            yield result


def _is_alive(device: torch.device) -> bool:
    """After some failures every further use of a GPU fails in this process."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _result(name: str, case: Case, stopwatch: Stopwatch | None, roofline: Roofline | None) -> Result:
    work = case.prepare()
    error = work.check()
    checked = Result(
        name,
        case.name,
        "ok" if error <= 1 else "wrong",
        error,
        goal=None if work.goal is None else str(work.goal),
    )
    if work.run is None:
        return checked
    if stopwatch is None or roofline is None:
        # That it runs is all a rehearsal can tell.
        work.run()
        if work.beside is not None:
            work.beside()
        return checked
    seconds = stopwatch.seconds(work.run)
    timed = replace(
        checked,
        seconds=seconds,
        beside_seconds=None if work.beside is None else stopwatch.seconds(work.beside),
        bytes_per_s=work.moved_bytes / seconds if work.moved_bytes else None,
        flops_per_s=work.flops / seconds if work.flops else None,
        roofline_share=roofline.seconds(work.moved_bytes, work.flops) / seconds or None,
    )
    return replace(timed, is_goal_reached=_is_reached(timed, work))


def _is_reached(result: Result, work: Work) -> bool | None:
    if work.goal is None:
        return None
    share, ratio = work.goal.min_roofline_share, work.goal.max_time_ratio
    return (share is None or (result.roofline_share or 0.0) >= share) and (
        ratio is None or (result.time_ratio is not None and result.time_ratio <= ratio)
    )
