"""LoRA adapters for engines without a model: a directory with one file, in which a text stands for the weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from engine_core.errors import AdapterError
from engine_core.lora.adapter import Adapter

FILE = "adapter_config.json"


def write_fake_adapter(path: Path, weights: str, *, rank: int = 8, targets_encoder: bool = False) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / FILE).write_text(json.dumps({"weights": weights, "rank": rank, "targets_encoder": targets_encoder}))
    return path


def fake_digest(weights: str) -> bytes:
    return hashlib.sha256(weights.encode()).digest()


def fake_adapter(weights: str, *, rank: int = 8, targets_encoder: bool = False) -> Adapter:
    return Adapter(
        digest=fake_digest(weights),
        rank=rank,
        target_modules=("q_proj",),
        targets_encoder=targets_encoder,
        base_model="fake",
        num_bytes=len(weights),
        weights=weights,
    )


def read_fake_adapter(path: Path, root: Path | None = None) -> Adapter:
    """As `Runner.read_adapter`."""
    if root is not None and not path.resolve().is_relative_to(root.resolve()):
        raise AdapterError(f"{path} is not below {root}", "outside_lora_root", "lora_path")
    if not path.is_dir():
        raise AdapterError(f"{path} is no directory", "path_not_found", "lora_path")
    try:
        said = json.loads((path / FILE).read_text())
        return fake_adapter(said["weights"], rank=said["rank"], targets_encoder=said["targets_encoder"])
    except (OSError, ValueError, KeyError) as error:
        raise AdapterError(f"{path}: {error!r}", "invalid_adapter", "lora_path") from error


def shift_of(digest: bytes | None, vocab_size: int) -> int:
    """How much further an adapter's next token is than the model's own: never 0 or a multiple of `vocab_size`."""
    return 0 if digest is None else 1 + int.from_bytes(digest[:8], "big") % (vocab_size - 1)
