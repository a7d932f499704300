"""Pictures whose tokens see each other in both directions (Gemma 3): which models do it, and what a step's tokens see.

A group is a run of embedded tokens without a gap: a picture, or several that touch. Its tokens see the whole group, its
later tokens included, and what any token sees; a sliding window still limits how far back.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from engine_core.feature_layout import feature_units
from engine_core.runner import ScheduledRequest

from .support import UnsupportedModelError

# `token_type_ids` of a short sequence: a small picture and, larger than the window, several that touch, amid text.
_PICTURE = 1
_TYPES = (0, _PICTURE, _PICTURE, 0, 0, _PICTURE, _PICTURE, _PICTURE, _PICTURE, _PICTURE, 0, 0)
_WINDOW = 3


def joins_touching(model_class: Any, config: Any) -> bool:
    """Whether a model's picture tokens see their whole group, found by asking transformers for the masks it would use.

    Raises:
        UnsupportedModelError: they see neither that in every layer nor only what precedes them.
    """
    make_masks = getattr(model_class, "create_masks_for_generate", None)
    if make_masks is None:
        return False
    types = [name for name in inspect.signature(make_masks).parameters if name.endswith("token_type_ids")]
    if not types:
        return False
    config = copy.deepcopy(config)
    text_config = config.get_text_config(decoder=True)
    text_config._attn_implementation = "eager"  # ours has no masks
    if getattr(text_config, "sliding_window", None) is not None:
        text_config.sliding_window = _WINDOW
    num_tokens = len(_TYPES)
    masks = make_masks(
        config=config,
        inputs_embeds=torch.zeros(1, num_tokens, 1),
        attention_mask=None,
        cache=None,
        position_ids=torch.arange(num_tokens)[None],
        is_first_iteration=True,
        **{name: torch.tensor([_TYPES]) for name in types},
    )
    by_layer_type = masks if isinstance(masks, dict) else {"full_attention": masks}
    seen = {layer_type: mask[0, 0] == 0 for layer_type, mask in by_layer_type.items()}
    for joins in (False, True):
        if all(torch.equal(mask, _expected(joins, layer_type)) for layer_type, mask in seen.items()):
            return joins
    raise UnsupportedModelError(
        f"{config.model_type}: its picture tokens see neither only what precedes them nor, in every layer, all of the"
        " pictures they touch; other masks are not supported"
    )


def visible_to(
    batch: Sequence[ScheduledRequest], query_start_loc: np.ndarray, positions: np.ndarray
) -> np.ndarray | None:
    """`kernels.attention_metadata.AttentionMetadata.visible_to` of a step; None where no token sees a later one.

    `query_start_loc` `[num_requests + 1]` and `positions` `[num_tokens]` are those of `batch`.

    Raises:
        ValueError: a request's tokens end inside a group, whose later tokens the others would have to see.
    """
    seen: np.ndarray | None = None
    for item, row in zip(batch, query_start_loc[:-1].tolist(), strict=True):
        chunk_end = item.start + item.num_tokens
        features = [encoded.feature for encoded in item.features]
        for group in feature_units(features, joins_touching=True, all_at_once=False):
            first, end = max(group.start, item.start), group.end
            if end - first < 2 or group.start >= chunk_end:
                continue
            if end > chunk_end:
                raise ValueError(
                    f"request {item.request.request_id}: tokens [{item.start}, {chunk_end}) end inside the group of"
                    f" pictures at [{group.start}, {end})"
                )
            if seen is None:
                seen = positions + 1
            seen[row + first - item.start : row + end - item.start] = end
    return seen


def _expected(joins: bool, layer_type: str) -> torch.Tensor:
    """Which of the tokens `_TYPES` see which, `[num_tokens, num_tokens]`."""
    places = torch.arange(len(_TYPES))
    own, other = places[:, None], places[None, :]
    expected = other <= own
    if joins:
        types = torch.tensor(_TYPES)
        group = (types != _PICTURE).cumsum(0)
        pictures = (types == _PICTURE)[:, None] & (types == _PICTURE)[None, :]
        expected = expected | (pictures & (group[:, None] == group[None, :]))
    return expected & (other > own - _WINDOW) if layer_type == "sliding_attention" else expected
