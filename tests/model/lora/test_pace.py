"""Reading beside steps: in pieces, with pauses."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from safetensors import safe_open

from engine_core import EngineRequest, SamplingParams
from engine_core.model.lora import pace
from engine_core.model.lora.pace import Pace, Work
from tests.model.equality import make_engine

from .adapter_files import WEIGHTS

PIECE_S = 0.004


@pytest.fixture
def pauses_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was slept; nobody does. Steps go on for long, as a busy machine makes pieces take any time."""
    slept: list[float] = []
    monkeypatch.setattr(pace, "_STEPS_GO_ON_FOR_S", 300.0)
    monkeypatch.setattr(pace.time, "sleep", slept.append)
    return slept


def step_elsewhere(of: Pace) -> None:
    thread = threading.Thread(target=of.step_begins)
    thread.start()
    thread.join()


def compute(for_s: float) -> None:
    end_s = time.thread_time() + for_s
    while time.thread_time() < end_s:
        pass


def test_a_piece_is_followed_by_a_longer_pause(pauses_s: list[float]) -> None:
    steps = Pace()
    work = Work(steps)
    for _ in range(3):
        step_elsewhere(steps)
        compute(PIECE_S)
        work.pause()
    assert len(pauses_s) == 3 and min(pauses_s) >= 5 * PIECE_S


def test_no_pause_is_long(pauses_s: list[float]) -> None:
    steps = Pace()
    step_elsewhere(steps)
    work = Work(steps)
    compute(0.1)
    work.pause()
    assert pauses_s == [0.05]


def test_tiny_pieces_are_paused_for_together(pauses_s: list[float]) -> None:
    steps = Pace()
    work = Work(steps)
    step_elsewhere(steps)
    end_s = time.thread_time() + PIECE_S
    num_pieces = 0
    while time.thread_time() < end_s:
        work.pause()
        num_pieces += 1
    assert 0 < len(pauses_s) < num_pieces / 2 and min(pauses_s) >= 0.001


def test_where_no_steps_go_on_nobody_waits(pauses_s: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Pace()
    work = Work(steps)

    def work_a_while() -> None:
        compute(PIECE_S)
        work.pause()

    work_a_while()
    steps.step_begins()  # in this thread, so there is none while it works
    work_a_while()
    step_elsewhere(steps)
    now_s = time.monotonic()
    monkeypatch.setattr(pace.time, "monotonic", lambda: now_s + 310)
    work_a_while()
    assert not pauses_s


def test_an_adapter_is_read_in_small_pieces(llama: Path, whole_adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with safe_open(whole_adapter / WEIGHTS, "pt") as file:
        num_tensors = len(file.keys())
    pieces: list[bool] = []
    monkeypatch.setattr(pace, "_STEPS_GO_ON_FOR_S", 300.0)  # reading takes as long as the machine lets it
    monkeypatch.setattr(Work, "pause", lambda work: pieces.append(work._pace.steps_go_on))
    engine = make_engine(llama, enable_lora=True)
    engine.load_adapter("alone", whole_adapter)
    assert len(pieces) > 2 * num_tensors and not any(pieces)

    def compute_steps() -> None:
        engine.add_request(EngineRequest("a", [5, 6, 7], SamplingParams(max_tokens=1)))
        while engine.has_unfinished_requests():
            engine.step()

    pieces.clear()
    thread = threading.Thread(target=compute_steps)
    thread.start()
    thread.join()
    engine.load_adapter("beside", whole_adapter)
    assert pieces and all(pieces)
