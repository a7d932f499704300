from __future__ import annotations

from pathlib import Path

import pytest

from frontend.prompt.tokenizer import ModelTokenizer, load_tokenizer
from tests.tiny_models import make_tiny_chat_model


@pytest.fixture(scope="session")
def chat_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_chat_model(tmp_path_factory.mktemp("models") / "tiny-chat")


@pytest.fixture(scope="session")
def chat_tokenizer(chat_model_dir: Path) -> ModelTokenizer:
    return load_tokenizer(chat_model_dir)
