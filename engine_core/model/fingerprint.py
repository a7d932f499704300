"""What must be equal on two machines: the cache namespace, root of every hash chain, and the tokenizer's digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Raise it when the same K/V are laid out differently in a block.
LAYOUT_VERSION = 1


def model_fingerprint(path: Path) -> str:
    """SHA-256 (hex) over the bytes of `config.json` and of all weight files. The directory's own name is not in it."""
    files = [path / "config.json", *sorted(path.glob("*.safetensors"))]
    with ThreadPoolExecutor() as pool:  # hashing releases the GIL
        digests = list(pool.map(_file_digest, files))
    total = hashlib.sha256()
    for file, digest in zip(files, digests, strict=True):
        total.update(f"{len(file.name)}:{file.name}".encode())
        total.update(digest)
    return total.hexdigest()


def cache_namespace(
    fingerprint: str,
    dtype: str,
    kv_dtype: str,
    block_size: int,
    quantization: str | None = None,
    groups: Sequence[Sequence[int]] = (),
) -> str:
    """Hex; equal exactly where KV blocks mean the same: weights and what they are computed with in, KV dtype, block
    size and layout. `groups` are the layers of each KV cache group; one has them all by itself.
    """
    parts: list[object] = [fingerprint, dtype, kv_dtype, block_size, LAYOUT_VERSION]
    if quantization is not None:
        parts.append(quantization)
    if len(groups) > 1:
        parts.append([list(layers) for layers in groups])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def tokenizer_digest(path: Path) -> str:
    """Hex; equal where the files are that turn text into token ids. Empty if a model directory has none of them."""
    # The first, where it is, says everything; the others are its older forms.
    for names in (["tokenizer.json"], ["tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt"]):
        files = [path / name for name in names if (path / name).is_file()]
        if files:
            total = hashlib.sha256()
            for file in files:
                total.update(f"{len(file.name)}:{file.name}".encode())
                total.update(_file_digest(file))
            return total.hexdigest()
    return ""


def _file_digest(file: Path) -> bytes:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()
