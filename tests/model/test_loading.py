"""What a process looks like while and after it loads a model."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import engine_core
from engine_core.errors import InvalidConfigError
from engine_core.model.loader import load_config, load_model
from tests.tiny_models import make_tiny_model


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "is_shown"), [(Terminal(), True), (io.StringIO(), False)])
def test_progress_is_drawn_on_a_terminal_only(
    stream: io.StringIO, is_shown: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_tiny_model("llama", tmp_path)
    monkeypatch.setattr(sys, "stderr", stream)
    load_model(directory, load_config(directory), torch.float32, torch.device("cpu"))
    assert ("Loading weights" in stream.getvalue()) == is_shown


def test_weights_that_were_not_copied_to_their_end_are_refused_by_their_path(tmp_path: Path) -> None:
    directory = make_tiny_model("llama", tmp_path)
    [weights] = directory.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(InvalidConfigError, match=rf"^model: a \*\.safetensors file in {directory} cannot be read"):
        load_model(directory, load_config(directory), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")],
)
def test_waiting_threads_leave_the_core_to_others_unless_told_otherwise(given: dict[str, str], expected: str) -> None:
    code = (
        "import os, sys, engine_core.model.resolve; assert 'torch' not in sys.modules;"
        " print(os.environ.get('GOMP_SPINCOUNT'))"
    )
    inherited = {k: v for k, v in os.environ.items() if k not in {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}}
    root = Path(engine_core.__file__).parents[1]
    printed = subprocess.check_output([sys.executable, "-c", code], env=inherited | given, cwd=root, text=True)
    assert printed.strip() == expected
