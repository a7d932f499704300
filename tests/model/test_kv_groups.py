"""Which layers share block tables, and what a block of the pool holds for them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from engine_core.model.kv_groups import KVGroup, described, group_layers, wasted_share
from engine_core.model.kv_pool import PoolLayout
from engine_core.model.support import LayerShape

MAX_MODEL_LEN = 32768


def layers(windows: Sequence[int | None]) -> dict[int, LayerShape]:
    return {layer_idx: LayerShape(1, 256, 256, window) for layer_idx, window in enumerate(windows)}


def sizes(windows: Sequence[int | None]) -> list[tuple[int | None, int]]:
    """Window and number of layers of each group."""
    return [(group.window, len(group.layers)) for group in group_layers(layers(windows), MAX_MODEL_LEN)]


def test_layers_that_see_equally_far_are_one_group() -> None:
    assert sizes([None] * 30) == [(None, 30)]
    assert sizes([4096] * 32) == [(4096, 32)]


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        # Gemma 2 2B, Gemma 3 270M and 4B.
        ([4096, None] * 13, [(4096, 13), (None, 13)]),
        ([*[512] * 5, None] * 3, [(512, 3)] * 5 + [(None, 3)]),
        (([*[1024] * 5, None] * 6)[:34], [(1024, 5)] * 5 + [(1024, 4), (None, 5)]),
        # Nearly equally many: a place stays empty rather than that there are three groups.
        ([4096, None, 4096, None, 4096, None, 4096, None, 4096], [(4096, 5), (None, 4)]),
        ([4096, None, 4096], [(4096, 1), (4096, 1), (None, 1)]),
        ([16, 64, None] * 2, [(16, 2), (64, 2), (None, 2)]),
    ],
)
def test_kinds_of_layers_are_cut_into_groups_of_equally_many(
    windows: list[int | None], expected: list[tuple[int | None, int]]
) -> None:
    assert sizes(windows) == expected
    groups = group_layers(layers(windows), MAX_MODEL_LEN)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    assert all(windows[layer] == group.window for group in groups for layer in group.layers)


def test_a_window_that_no_request_outgrows_is_none() -> None:
    shapes = layers([4096, None] * 2)
    assert group_layers(shapes, 4096) == (KVGroup((0, 1, 2, 3), None),)
    assert len(group_layers(shapes, 4097)) == 2


def test_layers_that_store_differently_much_are_one_group_that_keeps_everything() -> None:
    shapes = layers([1024, None]) | {2: LayerShape(2, 128, 128, 1024)}
    assert group_layers(shapes, MAX_MODEL_LEN) == (KVGroup((0, 1, 2), None),)
    # But where all see equally far they may differ.
    of_one_window = {0: LayerShape(1, 256, 256, 1024), 1: LayerShape(2, 128, 64, 1024)}
    assert group_layers(of_one_window, MAX_MODEL_LEN) == (KVGroup((0, 1), 1024),)


def test_one_group_when_asked_for() -> None:
    assert group_layers(layers([512, None]), MAX_MODEL_LEN, one_group=True) == (KVGroup((0, 1), None),)
    assert group_layers(layers([512, 512]), MAX_MODEL_LEN, one_group=True) == (KVGroup((0, 1), None),)


def test_the_log_says_which_groups_there_are_and_what_stays_empty() -> None:
    even = group_layers(layers([512, None, 512]), MAX_MODEL_LEN)
    assert (described(even), wasted_share(even)) == ("1x512,1x512,1xfull", 0)
    uneven = group_layers(layers([512, None, 512, None, 512, None, 512, None, 512]), MAX_MODEL_LEN)
    assert (described(uneven), wasted_share(uneven)) == ("5x512,4xfull", pytest.approx(0.1))


def layout_of(windows: Sequence[int | None]) -> PoolLayout:
    shapes = layers(windows)
    return PoolLayout(shapes, group_layers(shapes, MAX_MODEL_LEN), 16, torch.float32)


def test_layers_at_the_same_place_of_their_groups_share_memory() -> None:
    layout = layout_of(([*[1024] * 5, None] * 6)[:34])
    pool = layout.allocate(3, torch.device("cpu"))
    assert layout.windows == (*[1024] * 6, None)
    assert pool.num_groups == 7 and len(pool.tensors) == 2 * 5
    assert layout.block_bytes == 5 * 16 * 512 * 4 == sum(tensor[0].nbytes for tensor in pool.tensors)
    for place in range(5):
        sharing = [group.layers[place] for group in layout.groups if place < len(group.layers)]
        assert len({id(pool.caches[layer]) for layer in sharing}) == 1
    assert len({id(cache) for cache in pool.caches.values()}) == 5
    assert [pool.group_of[layer] for layer in (0, 4, 5, 6, 33)] == [0, 0, 6, 1, 5]


def test_one_group_has_memory_for_each_layer() -> None:
    shapes = {0: LayerShape(1, 256, 128, None), 1: LayerShape(2, 128, 64, None)}
    layout = PoolLayout(shapes, group_layers(shapes, MAX_MODEL_LEN), 16, torch.float32)
    pool = layout.allocate(3, torch.device("cpu"))
    assert [tuple(tensor.shape) for tensor in pool.tensors] == [
        *((3, 16, 1, 256), (3, 16, 1, 128)),
        *((3, 16, 2, 128), (3, 16, 2, 64)),
    ]
    assert layout.block_bytes == 16 * 4 * (256 + 128 + 2 * 128 + 2 * 64)
