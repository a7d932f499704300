"""What a model's vision tower is given, what comes out, and what is refused instead of breaking it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engine_core.model.runner import ModelRunner
from ipc.vocabulary import MultimodalFeature
from tests.tiny_models import make_tiny_model

from .picture_prompts import PromptMaker
from .picture_steps import make_runner

GetDirectory = Callable[[str], Path]
Inputs = dict[str, np.ndarray]


def runner_and_picture(family: str, directory: Path) -> tuple[ModelRunner, MultimodalFeature, Inputs]:
    prompt = PromptMaker(family, directory).make("one", 0)
    (feature,) = prompt.features
    return make_runner(directory), feature, prompt.inputs[feature.key]


@pytest.fixture(scope="module")
def llava(vlm_directory: GetDirectory) -> tuple[ModelRunner, MultimodalFeature, Inputs]:
    return runner_and_picture("llava", vlm_directory("llava"))


@pytest.fixture(scope="module")
def qwen3(vlm_directory: GetDirectory) -> tuple[ModelRunner, MultimodalFeature, Inputs]:
    return runner_and_picture("qwen3_vl", vlm_directory("qwen3_vl"))


def test_rows_are_as_many_as_placeholders_and_as_wide_as_embeddings(llava: Any) -> None:
    runner, feature, inputs = llava
    encoded = runner.encode(feature, inputs)
    assert encoded.rows.shape == (feature.num_embeds, 64)
    assert encoded.rows.dtype == torch.float32
    assert not encoded.deepstack
    # Nothing else of what the tower computed stays with them.
    assert encoded.rows.untyped_storage().nbytes() == feature.num_embeds * runner.info.multimodal.embed_bytes


def test_what_the_first_layers_get_belongs_to_a_row_and_is_weighed(qwen3: Any) -> None:
    runner, feature, inputs = qwen3
    encoded = runner.encode(feature, inputs)
    assert [rows.shape for rows in encoded.deepstack] == [(feature.num_embeds, 64)] * 2
    tensors = [encoded.rows, *encoded.deepstack]
    kept_bytes = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    assert kept_bytes == feature.num_embeds * runner.info.multimodal.embed_bytes


def test_the_same_inputs_give_the_same_rows_and_stay_as_they_were(llava: Any) -> None:
    runner, feature, inputs = llava
    frozen = {name: array.copy() for name, array in inputs.items()}
    for array in frozen.values():
        array.setflags(write=False)
    assert torch.equal(runner.encode(feature, inputs).rows, runner.encode(feature, frozen).rows)


def test_inputs_the_model_does_not_name_are_left_out(llava: Any) -> None:
    runner, feature, inputs = llava
    extra = inputs | {"num_patches": np.array([3]), "kwargs": np.array([3])}
    assert torch.equal(runner.encode(feature, extra).rows, runner.encode(feature, inputs).rows)


def test_pictures_are_computed_in_the_models_precision(vlm_directory: GetDirectory) -> None:
    directory = vlm_directory("llava")
    _, feature, inputs = runner_and_picture("llava", directory)
    runner = make_runner(directory, dtype="bfloat16")
    assert runner.encode(feature, inputs).rows.dtype == torch.bfloat16
    assert runner.info.multimodal.embed_bytes == 128


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pixel_values": None}, "the model needs pixel_values; there is nothing"),
        ({"pixel_values": np.full((1, 3, 28, 28), np.nan, np.float32)}, "pixel_values: has values that are not finite"),
        ({"pixel_values": np.array([["a"]])}, "pixel_values: is of <U1, not numbers"),
        ({"pixel_values": np.array([[object()]])}, "pixel_values: is of object, not numbers"),
        ({"pixel_values": np.zeros((0, 3, 28, 28), np.float32)}, "pixel_values: is empty"),
        ({"pixel_values": np.zeros((3,), np.float32)}, r"cannot compute pixel_values \(3,\)"),
        ({"pixel_values": np.zeros((1, 3, 56, 28), np.float32)}, r"cannot compute pixel_values \(1, 3, 56, 28\)"),
        ({"pixel_values": np.zeros((2, 3, 28, 28), np.float32)}, "made 32 rows of 64 values; .* room for 16 of 64"),
        ({"vision_feature_layer": np.array(99)}, "cannot compute"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_garbage_is_refused(changes: dict[str, Any], reason: str, llava: Any) -> None:
    runner, feature, inputs = llava
    given = {name: array for name, array in (inputs | changes).items() if array is not None}
    with pytest.raises(ValueError, match=reason):
        runner.encode(feature, given)
    assert runner.encode(feature, inputs).rows.isfinite().all()


def no_memory_on_a_cpu() -> None:
    torch.empty(1 << 50)


def no_memory_in_numpy() -> None:
    raise MemoryError


@pytest.mark.parametrize("fail", [no_memory_on_a_cpu, no_memory_in_numpy])
def test_what_the_machine_cannot_do_is_not_the_pictures_fault(
    fail: Callable[[], None], llava: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, feature, inputs = llava
    monkeypatch.setattr(runner._pictures.encoder._owner, "get_image_features", lambda **_: fail())
    with pytest.raises((RuntimeError, MemoryError)) as failed:
        runner.encode(feature, inputs)
    assert not isinstance(failed.value, ValueError)


@pytest.mark.parametrize("grid", [(1, 2, 24), (1, 10**9, 10**9), (-1, -6, 8)], ids=str)
def test_another_layout_than_the_announced_is_refused_before_it_is_computed_with(
    grid: tuple[int, ...], qwen3: Any
) -> None:
    runner, feature, inputs = qwen3
    with pytest.raises(ValueError, match=r"image_grid_thw: .* is not the layout of this picture"):
        runner.encode(feature, inputs | {"image_grid_thw": np.array([grid])})


def test_rows_of_another_picture_are_refused(qwen3: Any) -> None:
    runner, feature, inputs = qwen3
    num_tokens = feature.num_tokens - 1
    smaller = msgspec.structs.replace(feature, num_tokens=num_tokens, embed_ranges=((0, num_tokens),))
    with pytest.raises(ValueError, match=r"made 12 rows .* room for 11"):
        runner.encode(smaller, inputs)


def test_a_text_model_takes_none(llava: Any, tmp_path: Path) -> None:
    _, feature, inputs = llava
    runner = make_runner(make_tiny_model("llama", tmp_path))
    assert runner.info.multimodal is None
    with pytest.raises(ValueError, match="takes no pictures"):
        runner.encode(feature, inputs)
