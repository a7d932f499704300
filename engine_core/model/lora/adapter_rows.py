"""Which rows have which adapter while something is computed: what all layers of a runner look at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto

import torch

from kernels.lora_batch import LoraBatch, uniform_lora_batch


class RowKind(Enum):
    """What the rows that a linear layer is called with stand for."""

    TOKENS = auto()
    """The step's tokens, in the order of its batch."""
    LOGITS = auto()
    """The places in it that logits are wanted of: `logits_to_keep`."""
    PICTURES = auto()
    """Whatever a vision tower makes of one picture, or what follows it."""


class AdapterRows:
    """Empty, but while a step or a picture with adapters is computed. One thing is computed at a time.

    Attributes:
        tokens: of the step's tokens; None where none of them has an adapter.
    """

    def __init__(self) -> None:
        self.tokens: LoraBatch | None = None
        self._logits: LoraBatch | None = None
        self._picture_slot: int | None = None

    @contextmanager
    def of_step(self, tokens: LoraBatch | None, logits: LoraBatch | None) -> Iterator[None]:
        """Within it, a forward is computed with these."""
        self.tokens, self._logits = tokens, logits
        try:
            yield
        finally:
            self.tokens = self._logits = None

    @contextmanager
    def of_picture(self, slot: int | None) -> Iterator[None]:
        """Within it, a picture is encoded with the adapter in this slot."""
        self._picture_slot = slot
        try:
            yield
        finally:
            self._picture_slot = None

    def batch(self, kind: RowKind, num_rows: int, device: torch.device) -> LoraBatch | None:
        """What a layer that is called with `num_rows` rows of that kind has to add to; None if nothing."""
        if kind is RowKind.TOKENS:
            return self.tokens
        if kind is RowKind.LOGITS:
            return self._logits
        return None if self._picture_slot is None else uniform_lora_batch(num_rows, self._picture_slot, device)


@dataclass(frozen=True, slots=True)
class LayerAdapters:
    """For layers that compute what adapters add by themselves: room for how many, and who has which."""

    num_slots: int
    rows: AdapterRows
