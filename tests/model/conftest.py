"""Models shared by the tests of this folder: made once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine_core.model.resolve import resolve_model
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model, freshly converted."""
    return resolve_model("smollm2", tmp_path_factory.mktemp("cache")).path


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
