"""`benchmarks.lora` runs, on a tiny model: its table, its figures, and adapters that engines take."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.lora import ONE, UNUSED, WITHOUT

LIVENESS_S = 120.0


def test_adapters_are_measured_beside_none(model_directory: Callable[[str], Path], tmp_path: Path) -> None:
    sizes = "--rounds 1 --rows 3 --rank 2 --contexts 20 --prompts 17 --loads 2 --threads 1 --dtype float32".split()
    argv = [sys.executable, "-m", "benchmarks.lora", "--model", str(model_directory("llama")), *sizes]
    ran = subprocess.run(
        [*argv, "--out", tmp_path / "run.json"], capture_output=True, text=True, timeout=LIVENESS_S, check=False
    )
    assert ran.returncode == 0, ran.stderr
    header, _, *rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in ran.stdout.splitlines()]
    variants = [WITHOUT, UNUSED, ONE, "3 adapters"]
    assert header == ["ms", *variants]
    assert [row[0] for row in rows[:2]] == ["3 decodes after 20", "3 prompts of 17"]
    report = json.loads((tmp_path / "run.json").read_text())
    assert [list(medians_s) for medians_s in report["steps_s"].values()] == [variants] * 2
    assert len(report["loads"]) == 2
    for load in report["loads"]:
        assert 0 < load["usual_step_s"] <= load["longest_otherwise_s"]
        assert load["took_s"] > 0 and len(load["joined_s"]) == 2
