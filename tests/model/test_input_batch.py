"""What the scheduler hands over becomes one flattened row, with every token's slot where it belongs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from engine_core.model.input_batch import InputBatch, build_input_batch, lay_out
from engine_core.model.staging import HostStaging
from engine_core.request import Request
from engine_core.runner import EncodedFeature, ScheduledRequest
from ipc.vocabulary import EngineRequest, MultimodalFeature


def scheduled(
    token_ids: list[int],
    start: int,
    num_tokens: int,
    block_ids: list[int],
    num_shared_blocks: int = 0,
    features: Sequence[MultimodalFeature] = (),
) -> ScheduledRequest:
    request = Request(EngineRequest("r", token_ids), max_tokens=1, seed=0, arrival_time_s=0.0)
    encoded = [EncodedFeature(feature, None) for feature in features]
    return ScheduledRequest(request, start, num_tokens, [block_ids], num_shared_blocks, encoded)


def build(
    *batch: ScheduledRequest, windows: tuple[int | None, ...] = (None,), joins_touching: bool = False
) -> InputBatch:
    return build_input_batch(
        batch,
        lay_out(batch, windows, 4, None),
        block_size=4,
        dtype=torch.float32,
        staging=HostStaging(),
        joins_touching=joins_touching,
    )


def picture(start: int, *embed_ranges: tuple[int, int]) -> MultimodalFeature:
    return MultimodalFeature(bytes(32), start, embed_ranges[-1][1], embed_ranges, num_input_bytes=1)


def test_a_chunk_a_decode_and_a_whole_prompt() -> None:
    inputs = build(
        scheduled(list(range(100, 120)), start=6, num_tokens=5, block_ids=[7, 2, 9, 4, 1]),
        scheduled([50, 51, 52, 53, 54], start=4, num_tokens=1, block_ids=[3, 8]),
        scheduled([60, 61], start=0, num_tokens=2, block_ids=[5]),
    )
    assert inputs.input_ids.tolist() == [[106, 107, 108, 109, 110, 54, 60, 61]]
    assert inputs.position_ids.tolist() == [[6, 7, 8, 9, 10, 4, 0, 1]]
    assert inputs.metadata[0].slot_mapping.tolist() == [10, 11, 36, 37, 38, 32, 20, 21]
    assert inputs.metadata[0].query_start_loc.tolist() == [0, 5, 6, 8]
    assert inputs.metadata[0].seq_lens.tolist() == [11, 5, 2]
    assert inputs.metadata[0].block_tables.tolist() == [[7, 2, 9], [3, 8, 0], [5, 0, 0]]


def test_only_whoever_reaches_its_end_samples() -> None:
    inputs = build(
        scheduled(list(range(20)), start=6, num_tokens=5, block_ids=[0, 1, 2, 3, 4]),
        scheduled(list(range(5)), start=4, num_tokens=1, block_ids=[5, 6]),
        scheduled(list(range(2)), start=0, num_tokens=2, block_ids=[7]),
    )
    assert inputs.logits_places.on_device.tolist() == [5, 7]


def test_shared_blocks_are_never_written() -> None:
    """A whole-prompt hit computes its last token again, into slot −1; what follows goes to a block of its own."""
    whole = scheduled(list(range(8)), start=7, num_tokens=1, block_ids=[3, 5], num_shared_blocks=2)
    partly = scheduled(list(range(10)), start=8, num_tokens=2, block_ids=[3, 5, 6], num_shared_blocks=2)
    inputs = build(whole, partly)
    assert inputs.metadata[0].slot_mapping.tolist() == [-1, 24, 25]


def test_blocks_beyond_this_step_are_not_looked_at() -> None:
    inputs = build(scheduled(list(range(40)), start=0, num_tokens=3, block_ids=[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]))
    assert inputs.metadata[0].block_tables.tolist() == [[1]]


def visible_to(*batch: ScheduledRequest) -> list[int] | None:
    seen = build(*batch, joins_touching=True).metadata[0].visible_to
    return None if seen is None else seen.tolist()


BLOCKS = list(range(10))


def test_a_picture_and_pictures_that_touch_see_all_of_themselves() -> None:
    alone, left, right = picture(1, (0, 3)), picture(5, (0, 2)), picture(7, (0, 2))
    whole = scheduled([0] * 10, 0, 10, BLOCKS, features=[alone, left, right])
    assert visible_to(whole) == [1, 4, 4, 4, 5, 9, 9, 9, 9, 10]


def test_tokens_inside_a_picture_that_are_not_embedded_part_it() -> None:
    """And the parts of two pictures join where they touch."""
    left, right = picture(1, (0, 2), (3, 5)), picture(6, (0, 2), (4, 5))
    whole = scheduled([0] * 12, 0, 12, BLOCKS, features=[left, right])
    assert visible_to(whole) == [1, 3, 3, 4, 8, 8, 8, 8, 9, 10, 11, 12]


def test_of_a_group_that_is_partly_cached_only_the_rest_is_computed() -> None:
    left, right = picture(2, (0, 4)), picture(6, (0, 3))
    assert visible_to(scheduled([0] * 10, 4, 6, BLOCKS, features=[left, right])) == [9] * 5 + [10]
    assert visible_to(scheduled([0] * 10, 7, 3, BLOCKS, features=[right])) == [9, 9, 10]


def test_each_request_has_groups_of_its_own() -> None:
    decode = scheduled([0] * 6, 5, 1, BLOCKS)
    prompt = scheduled([0] * 6, 2, 4, BLOCKS, features=[picture(3, (0, 2))])
    assert visible_to(decode, prompt, decode) == [6, 3, 5, 5, 6, 6]


def test_where_no_token_sees_a_later_one_nothing_is_said() -> None:
    last_of_a_picture = scheduled([0] * 6, 5, 1, BLOCKS, features=[picture(2, (0, 4))])
    before_one = scheduled([0] * 12, 0, 6, BLOCKS, features=[picture(5, (0, 1), (3, 6))])
    assert visible_to(last_of_a_picture, before_one) is None
    assert build(scheduled([0] * 6, 0, 6, BLOCKS, features=[picture(2, (0, 4))])).metadata[0].visible_to is None


def test_a_step_that_ends_inside_a_group_is_refused() -> None:
    half = scheduled([0] * 12, 0, 8, BLOCKS, features=[picture(3, (0, 3)), picture(6, (0, 4))])
    with pytest.raises(ValueError, match=r"request r: tokens \[0, 8\) end inside the group of pictures at \[3, 10\)"):
        visible_to(half)


def test_each_group_has_its_own_tables_and_slots() -> None:
    """Of blocks out of its window a table says 0, whatever the scheduler's says."""
    chunk = scheduled(list(range(100, 130)), start=9, num_tokens=3, block_ids=[])
    chunk.block_tables = [[7, 2, 9, 4], [3, 8, 5, 6], [0, 11, 10, 12]]
    hit = scheduled([50, 51, 52, 53], start=3, num_tokens=1, block_ids=[], num_shared_blocks=1)
    hit.block_tables = [[1], [13], [14]]
    inputs = build(chunk, hit, windows=(None, 3, 6))
    assert [each.block_tables.tolist() for each in inputs.metadata] == [
        [[7, 2, 9], [1, 0, 0]],
        [[0, 8, 5], [13, 0, 0]],
        [[0, 11, 10], [14, 0, 0]],
    ]
    assert [each.slot_mapping.tolist() for each in inputs.metadata] == [
        [37, 38, 39, -1],
        [21, 22, 23, -1],
        [41, 42, 43, -1],
    ]
    assert all(each.seq_lens.tolist() == [12, 4] for each in inputs.metadata)
