"""M-RoPE: positions of a prompt with pictures, of any of its tokens and of what follows, from layouts alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from engine_core.model.picture_positions import PicturePositions
from engine_core.request import Request
from engine_core.runner import ScheduledRequest
from ipc.vocabulary import EngineRequest, MultimodalFeature

from .picture_steps import make_runner

MERGE = 2
CONFIG = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=MERGE))
# Its `get_rope_index` needs no weights, only these numbers.
OWNER: Any = SimpleNamespace(config=CONFIG)
for method in ("get_rope_index", "get_vision_position_ids"):
    setattr(OWNER, method, getattr(transformers.Qwen2VLModel, method).__get__(OWNER))
NUM_TOKENS = 30


def picture(start: int, grid: Sequence[int]) -> MultimodalFeature:
    """Of `grid` (time, height, width) in patches."""
    num_rows = grid[0] * (grid[1] // MERGE) * (grid[2] // MERGE)
    return MultimodalFeature(
        bytes(32), start, num_rows, ((0, num_rows),), num_input_bytes=1, layout={"image_grid_thw": tuple(grid)}
    )


FEATURES = (picture(2, (1, 4, 6)), picture(12, (1, 8, 2)))


def request(features: Sequence[MultimodalFeature] = FEATURES, num_output_tokens: int = 0) -> Request:
    made = Request(
        EngineRequest("r", [5] * NUM_TOKENS, mm_features=tuple(features)), max_tokens=9, seed=0, arrival_time_s=0.0
    )
    made.token_ids += [5] * num_output_tokens
    return made


def scheduled(of: Request, start: int, end: int) -> ScheduledRequest:
    return ScheduledRequest(of, start, end - start, [range(9)], 0)


def expected_positions(num_tokens: int) -> torch.Tensor:
    """By the model, of the whole sequence at once: `[3, num_tokens]`."""
    types = torch.zeros(1, num_tokens, dtype=torch.long)
    for feature in FEATURES:
        types[0, feature.start : feature.end] = 1
    grids = torch.tensor([feature.layout["image_grid_thw"] for feature in FEATURES])
    return OWNER.get_rope_index(torch.zeros_like(types), types, image_grid_thw=grids)[0][:, 0]


@pytest.fixture
def positions() -> PicturePositions:
    return PicturePositions(OWNER, CONFIG)


def test_any_tokens_of_a_prompt_and_of_its_output_have_the_models_positions(positions: PicturePositions) -> None:
    expected = expected_positions(NUM_TOKENS + 5)
    subject = request(num_output_tokens=5)
    for start in range(NUM_TOKENS + 5):
        for end in {start + 1, min(start + 7, NUM_TOKENS + 5), NUM_TOKENS + 5}:
            actual = positions.position_ids([scheduled(subject, start, end)])
            assert actual is not None and actual.shape == (3, 1, end - start)
            assert np.array_equal(actual[:, 0], expected[:, start:end])


def test_requests_of_one_step_have_positions_of_their_own(positions: PicturePositions) -> None:
    text, pictures, decode = request(()), request(), request((picture(0, (1, 2, 20)),), num_output_tokens=1)
    batch = [scheduled(text, 3, 6), scheduled(pictures, 0, 13), scheduled(decode, NUM_TOKENS, NUM_TOKENS + 1)]
    actual = positions.position_ids(batch)
    assert actual is not None
    assert actual[:, 0, :3].tolist() == [[3, 4, 5]] * 3
    assert np.array_equal(actual[:, 0, 3:16], expected_positions(NUM_TOKENS)[:, :13])
    # Ten tokens of one row take ten positions: nothing is shifted.
    assert actual[:, 0, 16].tolist() == [NUM_TOKENS] * 3


def test_continuations_share_their_prompts_positions(positions: PicturePositions) -> None:
    subject = request()
    fork = subject.fork(1)
    whole = expected_positions(NUM_TOKENS)
    for either in (fork, subject):
        actual = positions.position_ids([scheduled(either, 0, NUM_TOKENS)])
        assert actual is not None and np.array_equal(actual[:, 0], whole)
    assert len(positions._tables) == 1
    del subject, fork, either
    assert not positions._tables


def test_without_pictures_places_are_positions(positions: PicturePositions) -> None:
    assert positions.position_ids([scheduled(request(()), 0, 4)]) is None


@pytest.mark.parametrize(
    ("features", "reason"),
    [
        ([FEATURES[0], MultimodalFeature(bytes(32), 12, 4, ((0, 4),), 1)], r"mm_features\[1\].layout: .* is \[\]"),
        ([picture(2, (1, 4, 6)), picture(8, (1, 4, 4))], r"mm_features\[1\]: touches the one before"),
        (
            [MultimodalFeature(bytes(32), 2, 5, ((0, 5),), 1, {"image_grid_thw": (1, 4, 6)})],
            r"image_grid_thw \[1, 4, 6\] makes 6 tokens in one run, there are 5 in 1",
        ),
        (
            [MultimodalFeature(bytes(32), 2, 7, ((0, 3), (4, 7)), 1, {"image_grid_thw": (1, 4, 6)})],
            r"makes 6 tokens in one run, there are 6 in 2",
        ),
        (
            [MultimodalFeature(bytes(32), 2, 6, ((0, 6),), 1, {"image_grid_thw": (1, -4, -6)})],
            r"three numbers above 0, is \[1, -4, -6\]",
        ),
        ([MultimodalFeature(bytes(32), 2, 6, ((0, 6),), 1, {"image_grid_thw": (4, 6)})], r"is \[4, 6\]"),
    ],
    ids=["none", "touching", "another number", "two runs", "negative", "two numbers"],
)
def test_layouts_that_are_not_the_features_are_refused(
    features: list[MultimodalFeature], reason: str, positions: PicturePositions
) -> None:
    positions.check(FEATURES)
    with pytest.raises(ValueError, match=reason):
        positions.check(features)


def test_a_huge_grid_is_refused_before_anything_is_computed(positions: PicturePositions) -> None:
    huge = MultimodalFeature(bytes(32), 2, 6, ((0, 6),), 1, {"image_grid_thw": (10**9, 10**9, 10**9)})
    with pytest.raises(ValueError, match="makes 250000000000000000000000000 tokens"):
        positions.check([huge])


def test_a_runner_says_so(vlm_directory: Callable[[str], Path]) -> None:
    make_runner(vlm_directory("llava")).check_features([picture(2, (1, 4, 6)), picture(8, (1, 4, 4))])
    with pytest.raises(ValueError, match="touches"):
        make_runner(vlm_directory("qwen2_vl")).check_features([picture(2, (1, 4, 6)), picture(8, (1, 4, 4))])
