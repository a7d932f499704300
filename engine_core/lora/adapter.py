"""A LoRA adapter as a runner has read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ipc.vocabulary import ExtraKeySpan


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Adapter:
    """What an adapter is, whatever it is called.

    Attributes:
        digest: SHA-256 of its tensors and scaling, see `engine_core.model.lora.digest`.
        rank: the largest of its modules.
        target_modules: last parts of its modules' names, sorted.
        targets_encoder: it changes what is made of pictures.
        base_model: what it says it was trained on; may be empty.
        num_bytes: what `weights` weigh.
        weights: in whatever form the runner that has read them takes them, in host memory.
    """

    digest: bytes
    rank: int
    target_modules: tuple[str, ...]
    targets_encoder: bool
    base_model: str
    num_bytes: int
    weights: Any

    def span(self, name: str) -> ExtraKeySpan:
        """What makes KV computed with it its own, for a request that calls it `name`."""
        return ExtraKeySpan(0, None, "lora", self.digest.hex(), name)
