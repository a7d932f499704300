"""The benchmark of the frontend runs: what it measures is no claim here, only that it measures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_frontend_is_measured_beside_a_bare_handler(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    argv = ["--rounds", "1", "--streams", "2", "--tokens", "5", "--out", str(out)]
    command = [sys.executable, "-m", "benchmarks.frontend_overhead", *argv]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=200)
    figures = json.loads(out.read_text())
    assert set(figures) == {"foreword", "bare"}
    assert all(value > 0 for row in figures.values() for name, value in row.items() if not name.startswith("cpu"))
