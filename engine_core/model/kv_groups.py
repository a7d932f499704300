"""KV cache groups: layers that see equally far back, and so can give up the same blocks.

A model of one kind of layer has one group. Where some layers slide and others see everything, each kind is cut into
groups of equally many layers, so that a block, which holds some tokens of one group, is as large whichever group has
it: all are taken from one pool. (The idea of the hybrid allocator is vLLM's.)
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .support import LayerShape

logger = logging.getLogger(__name__)

# Where the larger kinds have so many times the layers of the smallest, groups are as large as the largest: one or two
# places in a block that stay empty cost less than twice as many block tables.
_NEARLY_EQUAL = 1.25


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers, by number, that see `window` tokens back, themselves included; None: all."""

    layers: tuple[int, ...]
    window: int | None


def group_layers(
    shapes: Mapping[int, LayerShape], max_model_len: int, *, one_group: bool = False
) -> tuple[KVGroup, ...]:
    """The groups of layers of these shapes. A window that no request outgrows is none.

    With `one_group`, or where layers that see differently far differ in what they store as well, all are in one group,
    which keeps everything.
    """
    by_window: dict[int | None, list[int]] = {}
    for layer_idx, shape in sorted(shapes.items()):
        window = shape.sliding_window
        if one_group or (window is not None and window >= max_model_len):
            window = None
        by_window.setdefault(window, []).append(layer_idx)
    if len(by_window) == 1:
        [(window, layers)] = by_window.items()
        return (KVGroup(tuple(layers), window),)
    if len({(shape.num_kv_heads, shape.key_head_dim, shape.value_head_dim) for shape in shapes.values()}) > 1:
        logger.info("kv_groups_joined reason=%r", "layers of different windows store differently much")
        return (KVGroup(tuple(sorted(shapes)), None),)
    counts = [len(layers) for layers in by_window.values()]
    size = max(counts) if max(counts) <= _NEARLY_EQUAL * min(counts) else min(counts)
    return tuple(
        KVGroup(tuple(layers[first : first + size]), window)
        for window, layers in by_window.items()
        for first in range(0, len(layers), size)
    )


def described(groups: Sequence[KVGroup]) -> str:
    """For the log: of each group its number of layers and how far these see."""
    return ",".join(f"{len(group.layers)}x{'full' if group.window is None else group.window}" for group in groups)


def wasted_share(groups: Sequence[KVGroup]) -> float:
    """Of the blocks' memory, what stays empty because groups are shorter than the longest."""
    num_places = len(groups) * max(len(group.layers) for group in groups)
    return 1 - sum(len(group.layers) for group in groups) / num_places
