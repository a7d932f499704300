"""`benchmarks.passes` and `benchmarks.step_profile` run, on a tiny model, and name what they measure."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.passes import PASSES
from benchmarks.step_profile import Clock, columns
from engine_core import EngineConfig

LIVENESS_S = 120.0


def cells_of_table(module: str, *arguments: str) -> list[list[str]]:
    argv = [sys.executable, "-m", f"benchmarks.{module}", "--dtype", "float32", "--threads", "1", *arguments]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=LIVENESS_S, check=False)
    assert ran.returncode == 0, ran.stderr
    header, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in ran.stdout.splitlines()]
    return [header, *rows]


def test_steps_are_measured_with_each_pass_left_out(model_directory: Callable[[str], Path]) -> None:
    sizes = ["--rounds", "1", "--rows", "1,3", "--contexts", "20", "--prompts", "40"]
    header, *rows = cells_of_table("passes", "--model", str(model_directory("llama")), *sizes)
    assert header == ["ms", "`all`", *(f"`without {name}`" for name in PASSES), "`none`"]
    assert [row[0] for row in rows] == ["1 decode after 20", "3 decodes after 20", "prefill of 40"]
    assert all(float(cell.split()[0]) > 0 for row in rows for cell in row[1:])


def test_each_pass_is_a_switch_that_is_on() -> None:
    assert all(getattr(EngineConfig(model="any"), name) is True for name in PASSES)


def test_every_stage_of_a_step_is_found(model_directory: Callable[[str], Path]) -> None:
    sizes = ["--rows", "1,3", "--context", "20", "--steps", "20"]
    header, *rows = cells_of_table("step_profile", "--model", str(model_directory("llama")), *sizes)
    assert header[1:-3] == columns()
    assert [row[0] for row in rows] == ["1", "3"]
    for row in rows:
        stages_us = dict(zip(header[1:-2], (float(cell.replace(",", "")) for cell in row[1:-2]), strict=True))
        assert all(stages_us.values())
        assert sum(stages_us[name] for name in columns()) > 0.5 * stages_us["step"]


def test_a_stage_within_a_stage_counts_once() -> None:
    seconds = iter([0.0, 1.0, 5.0, 7.0])
    clock = Clock(lambda: next(seconds))
    clock.timed(clock.timed(lambda: None, "inner"), "outer")()
    assert clock.read() == ({"inner": 4.0, "outer": 3.0}, 2)
    assert clock.read() == ({}, 0)
