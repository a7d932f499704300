from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.adapters import make_adapter
from tests.tiny_models import make_tiny_model

TARGETS = ["q_proj", "down_proj"]


@pytest.fixture(scope="package")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=2)


@pytest.fixture(scope="package")
def whole_adapter(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rank 4, alpha 8, on `TARGETS`. Not to be changed."""
    return make_adapter(llama, tmp_path_factory.mktemp("adapter"), targets=TARGETS, rank=4, alpha=8)


@pytest.fixture
def adapter(whole_adapter: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(whole_adapter, tmp_path / "adapter"))
