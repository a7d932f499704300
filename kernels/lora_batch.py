"""Which tokens of a step go through which LoRA adapter, worked out once per step and used by every layer.

Tokens are sorted by adapter, so that a tile of them has one adapter and its weights are read once for all of them. In a
step of decodes a tile may well hold a single token: tensor cores then work for one row in sixteen, which costs nothing
where reading the weights takes all the time. So prefill, decode and any mix of the two are one case.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .device_batch import Upload

# Tensor cores take 16 rows at least. More of them read the weights less often, as long as there are that many tokens.
_SMALL_TILE_TOKENS = 16
_LARGE_TILE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class LoraBatch:
    """The tokens of a step that have an adapter.

    Attributes:
        rows: int32 `[num_rows]`, their places in the batch, sorted by adapter.
        tiles: int32 `[num_tiles, 3]`: adapter, first place in `rows`, number of tokens, which is 0 in tiles that only
            fill the table up.
        tile_tokens: what that number is at most.
        segments: for each adapter in use itself, and where its tokens begin and end in `rows`; on the host.
        slots: int32 `[num_tokens]`, each token's adapter, −1 without one; on the host.
    """

    rows: torch.Tensor
    tiles: torch.Tensor
    tile_tokens: int
    segments: tuple[tuple[int, int, int], ...]
    slots: torch.Tensor

    @property
    def slots_in_use(self) -> tuple[int, ...]:
        return tuple(slot for slot, _, _ in self.segments)


def lora_batch(
    adapters: np.ndarray, device: torch.device, *, has_fixed_size: bool = False, upload: Upload | None = None
) -> LoraBatch:
    """The batch in which token i has the adapter in slot `adapters[i]`; −1: none.

    With `has_fixed_size` all shapes depend on `len(adapters)` alone, as a CUDA graph needs it. Such a batch launches
    kernels even where no token has an adapter, while another one then launches none. `upload` brings arrays that change
    no more to `device`, by default by copies that are waited for.
    """
    rows, tiles, tile_tokens, segments = _arranged(adapters, has_fixed_size)
    if upload is None:
        rows_there, tiles_there = (torch.from_numpy(array).to(device) for array in (rows, tiles))
    else:
        rows_there, tiles_there = upload(rows, tiles)
    return LoraBatch(rows_there, tiles_there, tile_tokens, segments, torch.from_numpy(adapters.astype(np.int32)))


def uniform_lora_batch(num_rows: int, adapter: int, device: torch.device) -> LoraBatch:
    """The batch all of whose rows have that adapter, made where it is used: nothing is copied."""
    tile_tokens = _SMALL_TILE_TOKENS if num_rows <= _SMALL_TILE_TOKENS else _LARGE_TILE_TOKENS
    rows = torch.arange(num_rows, dtype=torch.int32, device=device)
    starts = rows[::tile_tokens]
    counts = (num_rows - starts).clamp_max(tile_tokens)
    tiles = torch.stack([torch.full_like(starts, adapter), starts, counts], dim=1)
    segments = ((adapter, 0, num_rows),) if num_rows else ()
    return LoraBatch(rows, tiles, tile_tokens, segments, torch.full((num_rows,), adapter, dtype=torch.int32))


class ReplayedLoraBatch:
    """A batch of `num_tokens` tokens as a captured graph reads it.

    Attributes:
        numbers: int32, on the device: what `numbers_for` is to be copied to before each replay.
        batch: that reads it. No token has an adapter at first.
    """

    def __init__(self, num_tokens: int, device: torch.device) -> None:
        self.numbers = torch.zeros(4 * num_tokens, dtype=torch.int32, device=device)
        rows, tiles = self.numbers.split([num_tokens, 3 * num_tokens])
        nobody = torch.full((num_tokens,), -1, dtype=torch.int32)
        self.batch = LoraBatch(rows, tiles.view(num_tokens, 3), _SMALL_TILE_TOKENS, (), nobody)

    def numbers_for(self, adapters: np.ndarray) -> np.ndarray:
        """Of a step that is as `adapters` `[num_tokens]` say, see `lora_batch`."""
        rows, tiles, _, _ = _arranged(adapters, has_fixed_size=True)
        return np.concatenate([rows, tiles.ravel()])


def _arranged(
    adapters: np.ndarray, has_fixed_size: bool
) -> tuple[np.ndarray, np.ndarray, int, tuple[tuple[int, int, int], ...]]:
    """What a `LoraBatch` has, on the host."""
    with_adapter = np.flatnonzero(adapters >= 0)
    rows = with_adapter[np.argsort(adapters[with_adapter], kind="stable")]
    slots, starts = np.unique(adapters[rows], return_index=True)
    lengths = np.diff(starts, append=len(rows))
    is_small = has_fixed_size or lengths.max(initial=0) <= _SMALL_TILE_TOKENS
    tile_tokens = _SMALL_TILE_TOKENS if is_small else _LARGE_TILE_TOKENS

    tiles_of = -(-lengths // tile_tokens)
    segment_of = np.repeat(np.arange(len(slots)), tiles_of)
    tile_in_segment = np.arange(len(segment_of)) - np.repeat(np.cumsum(tiles_of) - tiles_of, tiles_of)
    offsets = tile_in_segment * tile_tokens
    counts = np.minimum(tile_tokens, lengths[segment_of] - offsets)
    tiles = np.stack([slots[segment_of], starts[segment_of] + offsets, counts], axis=1)
    if has_fixed_size:
        rows = np.pad(rows, (0, len(adapters) - len(rows)))
        tiles = np.pad(tiles, ((0, len(adapters) - len(tiles)), (0, 0)))
    segments = tuple(zip(slots.tolist(), starts.tolist(), (starts + lengths).tolist(), strict=True))
    return rows.astype(np.int32), tiles.astype(np.int32), tile_tokens, segments
