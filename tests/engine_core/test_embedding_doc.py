"""The loop in docs/embedding.md, run as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.adapters import make_adapter
from tests.tiny_models import make_tiny_model
from tests.tiny_vlms import make_tiny_vlm

DOC = Path(__file__).parents[2] / "docs" / "embedding.md"


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", DOC.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_the_loop_runs_and_the_second_chat_finds_the_first_ones_prefix(tmp_path: Path):
    script = tmp_path / "loop.py"
    script.write_text(blocks()[0])
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240, check=True)
    cached = {name: int(count) for name, count in re.findall(r"(chat-\d): .+ \((\d+) prompt tokens", done.stdout)}
    assert cached["chat-0"] == 0
    assert cached["chat-1"] >= 16


def test_the_loop_is_about_twenty_lines():
    assert len([line for line in blocks()[0].splitlines() if line.strip()]) <= 21


def test_the_extra_key_example_runs():
    exec(compile(blocks()[1], str(DOC), "exec"), {})


def test_two_questions_about_a_picture_encode_it_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model, picture = make_tiny_vlm("llava", tmp_path / "model"), tmp_path / "cat.png"
    Image.new("RGB", (64, 48), "orange").save(picture)
    code = blocks()[2].replace('"path/to/model"', repr(str(model))).replace('"cat.png"', repr(str(picture)))
    exec(compile(code, str(DOC), "exec"), {})
    said = capsys.readouterr().out
    cached = {name: int(count) for name, count in re.findall(r"(chat-\d): .*\((\d+) prompt tokens", said)}
    assert cached["chat-0"] == 0
    assert cached["chat-1"] >= 16
    assert "pictures encoded: 1" in said


def test_building_requests_loads_no_torch():
    code = "import sys; from engine_core import EngineRequest, EngineConfig; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_adapter_and_the_model_itself_answer_beside_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model, adapter = make_tiny_model("llama", tmp_path / "model"), tmp_path / "adapter"
    make_adapter(model, adapter)
    code = blocks()[3].replace('"path/to/model"', repr(str(model))).replace('"path/to/adapter"', repr(str(adapter)))
    exec(compile(code, str(DOC), "exec"), {})
    said = capsys.readouterr().out
    assert re.match(r"rank \d+, \d+ bytes, digest [0-9a-f]{64}\n", said)
    answers = {name: re.findall(rf"^{name} \[(\d+)\]$", said, flags=re.MULTILINE) for name in ("base", "pirate")}
    assert len(answers["base"]) == len(answers["pirate"]) == 8
    assert answers["base"] != answers["pirate"]
