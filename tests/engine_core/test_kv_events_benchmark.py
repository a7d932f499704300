"""`benchmarks.kv_events` works, on a workload that takes a moment."""

from __future__ import annotations

import re

import pytest

from benchmarks.kv_events import PROMPT_BLOCKS, measure_engine, measure_publishing


def test_every_row_is_measured(capsys: pytest.CaptureFixture[str]):
    measure_engine(1)
    measure_publishing(PROMPT_BLOCKS, 1)
    shown = capsys.readouterr().out
    assert len(re.findall(r"\d\.\d{3}$", shown, re.MULTILINE)) == 2
    assert f"{PROMPT_BLOCKS} blocks" in shown and shown.count("blocks/s") == 3
