"""Where the K/V of a step's tokens goes, as kernels and as torch want to know it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class SlotMapping:
    """A slot for each token of a step, for every layer.

    Args:
        tensor: `[num_tokens]` int64, on the caches' device: a place in the pool's slots, all blocks' one after the
            other, no two the same; −1 is nowhere.
    """

    tensor: torch.Tensor
    _stored: tuple[torch.Tensor | None, torch.Tensor] | None = field(init=False, default=None, repr=False)

    @property
    def stored(self) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The tokens that have a slot, None for all of them, and their slots. Worked out once; waits for a GPU."""
        if self._stored is None:
            # As an index, −1 would be the last slot of the pool.
            has_slot = self.tensor >= 0
            rows = None if has_slot.all() else has_slot.nonzero().flatten()
            self._stored = rows, self.tensor if rows is None else self.tensor[rows]
        return self._stored
