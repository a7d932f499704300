"""M-RoPE: positions in three dimensions (time, height, width), for models whose pictures have them.

A picture takes up as many positions as its longer side, not as it has tokens. So every token after it is a constant
away from its place in the sequence, and nothing but the layouts of the pictures is needed to know all positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from engine_core.request import Request
from engine_core.runner import ScheduledRequest
from ipc.vocabulary import MultimodalFeature

_GRID = "image_grid_thw"
_PICTURE, _TEXT = 1, 0


def merge_size(config: Any) -> int:
    """How many patches in a row, and in a column, become one token."""
    return getattr(getattr(config, "vision_config", None), "spatial_merge_size", 1)


class PicturePositions:
    """Positions of requests with pictures, worked out once for each and kept as long as it is there.

    `get_rope_index` is the model's own; what it remembers of its last call (`rope_deltas`) is not used.
    """

    def __init__(self, owner: Any, config: Any) -> None:
        self._get_rope_index = owner.get_rope_index
        self._merge_size = merge_size(config)
        # With how far tokens after the pictures are from their places.
        self._tables: WeakKeyDictionary[Request, tuple[np.ndarray, int]] = WeakKeyDictionary()

    @staticmethod
    def are_used_by(owner: Any) -> bool:
        """Whether a model numbers its tokens like this, as far as its code says."""
        get_rope_index = getattr(owner, "get_rope_index", None)
        if get_rope_index is None:
            return False
        return {_GRID, "mm_token_type_ids"} <= inspect.signature(get_rope_index).parameters.keys()

    def check(self, features: Sequence[MultimodalFeature]) -> None:
        """Make sure that positions can be computed. Any thread may call this.

        Raises:
            ValueError: a layout is not that of its feature.
        """
        end = 0
        for index, feature in enumerate(features):
            grid = feature.layout.get(_GRID, ())
            if len(grid) != 3 or min(grid) < 1:
                raise ValueError(f"mm_features[{index}].layout: {_GRID} must be three numbers above 0, is {list(grid)}")
            time, height, width = grid
            num_rows = time * (height // self._merge_size) * (width // self._merge_size)
            if num_rows != feature.num_embeds or len(feature.embed_ranges) != 1:
                raise ValueError(
                    f"mm_features[{index}].layout: {_GRID} {list(grid)} makes {num_rows} tokens in one run, there are"
                    f" {feature.num_embeds} in {len(feature.embed_ranges)}"
                )
            if index and feature.start == end:
                raise ValueError(f"mm_features[{index}]: touches the one before; their positions cannot be told apart")
            end = feature.end

    def position_ids(self, batch: Sequence[ScheduledRequest]) -> np.ndarray | None:
        """`[3, 1, num_tokens]`; None if no request of the batch has pictures: then places are positions."""
        if not any(item.request.features for item in batch):
            return None
        columns = [self._columns(item) for item in batch]
        return np.concatenate(columns, axis=1)[:, None]

    def _columns(self, item: ScheduledRequest) -> np.ndarray:
        """`[3, item.num_tokens]`."""
        places = np.arange(item.start, item.start + item.num_tokens)
        if not item.request.features:
            return np.broadcast_to(places, (3, len(places)))
        # Continuations share their prompt's.
        request = item.request.parent or item.request
        known = self._tables.get(request)
        if known is None:
            known = self._tables[request] = self._table(request.features)
        table, delta = known
        num_known = min(max(table.shape[1] - item.start, 0), item.num_tokens)
        after_pictures = places[num_known:] + delta
        return np.concatenate(
            [table[:, item.start : item.start + num_known], np.broadcast_to(after_pictures, (3, len(after_pictures)))],
            axis=1,
        )

    def _table(self, features: Sequence[MultimodalFeature]) -> tuple[np.ndarray, int]:
        """Positions `[3, end of the last picture]`, and what is added to the place of a token after it."""
        types = torch.full((1, features[-1].end), _TEXT)
        for feature in features:
            types[0, feature.start : feature.end] = _PICTURE
        grids = torch.tensor([feature.layout[_GRID] for feature in features])
        positions, _ = self._get_rope_index(
            input_ids=torch.zeros_like(types), mm_token_type_ids=types, **{_GRID: grids}
        )
        table = positions[:, 0].numpy()
        return table, int(table.max()) + 1 - table.shape[1]
