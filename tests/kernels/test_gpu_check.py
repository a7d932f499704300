"""`benchmarks.gpu_check` works, as far as that can be seen without a GPU: rehearsed, and with a clock that is none."""

from __future__ import annotations

import json
import math
import pkgutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

import kernels
from benchmarks.gpu_check import running
from benchmarks.gpu_check.__main__ import main
from benchmarks.gpu_check.case import Case, Goal, Setting, Work, apart
from benchmarks.gpu_check.cases import CASES, engine
from benchmarks.gpu_check.report import Result, table_row
from benchmarks.gpu_check.timing import Roofline
from tests.wire_peers import ROOT

pytest.importorskip("triton", reason="Triton is not installed")

REHEARSAL = Setting(torch.device("cpu"), is_rehearsal=True)
# Files whose kernels are launched by another file's public function.
BEHIND = {"tiled_attention": "paged_attention", "merge_parts": "paged_attention"}


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_a_rehearsal_finds_everything_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rehearse", "--json", str(tmp_path / "out.json")]) == 0
    saved = json.loads((tmp_path / "out.json").read_text())
    assert {result["kernel"] for result in saved["results"]} == set(CASES)
    assert {result["outcome"] for result in saved["results"]} == {"ok"}
    assert saved["torch"] == torch.__version__
    printed = capsys.readouterr().out
    assert all(f"| {name} " in printed for name in CASES)


def test_every_file_of_kernels_has_cases() -> None:
    modules = {module.name for module in pkgutil.iter_modules(kernels.__path__) if not module.name.startswith("_")}
    with_kernels = {
        module
        for module in modules
        if any(name.endswith("_kernel") for name in vars(import_module(f"kernels.{module}")))
    }
    assert {BEHIND.get(module, module) for module in with_kernels} <= set(CASES)
    assert set(CASES) - {"engine"} <= modules


def test_torch_triton_and_numpy_are_enough() -> None:
    code = (
        "import sys, benchmarks.gpu_check.running\n"
        "sys.exit(bool({'msgspec', 'transformers', 'zmq', 'engine_core', 'frontend'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=120).returncode == 0


@pytest.mark.parametrize("name", ["msgspec", "transformers"])
def test_the_engine_is_left_out_where_it_cannot_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    assert not list(engine.engine_cases(REHEARSAL))


def run(
    monkeypatch: pytest.MonkeyPatch, *prepares: Callable[[], Work], stopwatch: object = None, limit_s: float = 60.0
) -> list[Result]:
    def cases(setting: Setting) -> Iterator[Case]:
        yield from (Case(f"case {number}", prepare) for number, prepare in enumerate(prepares))

    monkeypatch.setattr(running, "CASES", {"some": cases})
    roofline = Roofline(bytes_per_s=1e9, flops_per_s=1e12)
    return list(running.run_cases(["some"], REHEARSAL, stopwatch, roofline, time.monotonic() + limit_s))  # type: ignore[arg-type]


def test_what_is_wrong_or_fails_is_said_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Work:
        raise RuntimeError("no such luck")

    results = run(
        monkeypatch, lambda: Work(lambda: 1.5), fails, lambda: Work(lambda: math.nan), lambda: Work(lambda: 1)
    )
    assert [result.outcome for result in results] == ["wrong", "failed", "wrong", "ok"]
    assert results[1].reason == "RuntimeError: no such luck"


def test_what_would_begin_too_late_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    results = run(monkeypatch, lambda: Work(lambda: 0.0), limit_s=-1.0)
    assert [result.outcome for result in results] == ["left out"]


@pytest.mark.parametrize(("outcome", "code"), [(0.0, 0), (2.0, 1)])
def test_the_exit_code_says_whether_all_is_right(monkeypatch: pytest.MonkeyPatch, outcome: float, code: int) -> None:
    monkeypatch.setattr(running, "CASES", {"some": lambda setting: [Case("one", lambda: Work(lambda: outcome))]})
    assert running.run_all(["some"], is_rehearsal=True, limit_s=60.0, json_path=None) == code


def test_without_a_gpu_it_does_not_begin(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("kernels.triton_language.IS_INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    assert "no GPU" in capsys.readouterr().err


class FakeStopwatch:
    """Half a second for what we run, two for what is beside it."""

    def seconds(self, run: Callable[[], object]) -> float:
        return 0.5 if run() == "ours" else 2.0


@pytest.mark.parametrize(
    ("goal", "reached"),
    [
        (None, None),
        (Goal(min_roofline_share=0.8), True),
        (Goal(min_roofline_share=0.9), False),
        (Goal(max_time_ratio=0.3), True),
        (Goal(max_time_ratio=0.2), False),
    ],
    ids=str,
)
def test_times_become_rates_shares_and_goals(
    monkeypatch: pytest.MonkeyPatch, goal: Goal | None, reached: bool | None
) -> None:
    def work() -> Work:
        # At least 0.4 s of copying; the arithmetic takes less.
        return Work(lambda: 0.0, lambda: "ours", lambda: "torch's", moved_bytes=4e8, flops=1e11, goal=goal)

    (result,) = run(monkeypatch, work, stopwatch=FakeStopwatch())
    assert (result.bytes_per_s, result.flops_per_s) == (8e8, 2e11)
    assert result.roofline_share == pytest.approx(0.8)
    assert result.time_ratio == 0.25
    assert result.is_goal_reached is reached
    row = table_row(result)
    assert "500,000.0" in row and "0.2 TFLOP/s" in row and "80%" in row and "0.25" in row
    assert ("NOT" in row) is (reached is False)


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.0 + 2.0**-20], [1.0, 2.0], 0.5),
        ([1.0, math.nan], [1.0, 2.0], math.inf),
        ([1.0, math.nan], [1.0, math.nan], 0.0),
        ([1.0, -math.inf], [1.0, -math.inf], 0.0),
        ([1.0, math.inf], [1.0, -math.inf], math.inf),
        ([1.0], [1.0, 2.0], math.inf),
        ([], [], 0.0),
    ],
    ids=str,
)
def test_apart(actual: list[float], expected: list[float], error: float) -> None:
    assert apart(torch.tensor(actual), torch.tensor(expected), units=4) == error
