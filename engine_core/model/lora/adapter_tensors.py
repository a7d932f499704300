"""What stands in a PEFT directory, found right for a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kernels.lora import LoraPart


@dataclass(frozen=True, slots=True)
class ModuleShape:
    """A linear layer of the model as transformers has it."""

    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True, eq=False)
class AdapterTensors:
    """Of one adapter.

    Attributes:
        digest: SHA-256 of all tensors and scalings.
        base_model: what the adapter says it was trained on; may be empty.
        parts: by the module's path in the model, on the host, in the file's type.
    """

    digest: bytes
    base_model: str
    parts: Mapping[str, LoraPart]
