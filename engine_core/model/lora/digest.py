"""What makes two adapters the same: SHA-256 over all their modules' paths, scalings and weights.

Neither the order in the file nor its metadata, and nothing of `adapter_config.json` but what it makes of scalings. The
bytes hashed are, for each module in the order of paths: the path's length (8 bytes, little-endian like all that
follows) and its UTF-8; the scaling (float64); the type's name, as the path; rank, in_features, out_features (8 bytes
each); then A and B as they stand in the file.
"""

from __future__ import annotations

import hashlib
import struct

import torch

from kernels.lora import LoraPart


class AdapterDigest:
    """Takes modules one after the other, in the order of their paths. Other threads go on meanwhile."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, path: str, part: LoraPart) -> None:
        """`part.a` and `part.b` are contiguous and of one type."""
        rank, in_features = part.a.shape
        self._add_text(path)
        self._hash.update(struct.pack("<d", part.scaling))
        self._add_text(str(part.a.dtype).removeprefix("torch."))
        self._hash.update(struct.pack("<QQQ", rank, in_features, part.b.shape[0]))
        for tensor in (part.a, part.b):
            self._hash.update(memoryview(tensor.view(-1).view(torch.uint8).numpy()))

    def digest(self) -> bytes:
        return self._hash.digest()

    def _add_text(self, text: str) -> None:
        encoded = text.encode()
        self._hash.update(struct.pack("<Q", len(encoded)) + encoded)
