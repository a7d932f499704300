"""What a request may choose of a picture's processing, and what is refused with the reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from multimodal.errors import MediaError
from multimodal.options import ImageOptions, OptionError
from multimodal.processor import load_picture_processor
from tests.multimodal.families import directory_of, inputs_of, processor_of


def test_equal_choices_are_equal_however_they_are_written():
    processor = processor_of("qwen2_vl")
    one = processor.options(processor_kwargs={"max_pixels": 1024, "min_pixels": 64})
    other = processor.options(processor_kwargs={"min_pixels": 64, "max_pixels": 1024})
    assert one == other and hash(one) == hash(other) and one.canonical == other.canonical
    assert one != processor.options() == ImageOptions()


def test_auto_is_high_and_low_is_not():
    auto, high, low = (processor_of("llava").options(detail) for detail in ("auto", "high", "low"))
    assert auto.canonical == high.canonical != low.canonical


@pytest.mark.parametrize("detail", ["LOW", "", None, 3])
def test_an_unknown_detail_is_named(detail: Any):
    with pytest.raises(OptionError, match=f"auto, high, low, not {detail!r}") as raised:
        processor_of("llava").options(detail)
    assert raised.value.name is None


@pytest.mark.parametrize(
    ("family", "kwargs", "reason"),
    [
        ("qwen2_vl", {"max_pixel": 100}, "takes no 'max_pixel' here, but .*max_pixels"),
        ("qwen2_vl", {"return_tensors": "pt"}, "takes no 'return_tensors'"),
        ("qwen2_vl", {"device": "cuda"}, "takes no 'device'"),
        ("qwen2_vl", {"patch_size": 7}, "takes no 'patch_size'"),
        ("qwen2_vl", {"merge_size": 4}, "takes no 'merge_size'"),
        ("qwen2_vl", {"image_std": [0, 0, 0]}, "takes no 'image_std'"),
        ("qwen2_vl", {"do_normalize": False}, "takes no 'do_normalize'"),
        ("llava_next", {"image_grid_pinpoints": [[28, 28]]}, "takes no 'image_grid_pinpoints'"),
        ("idefics3", {"return_row_col_info": False}, "takes no 'return_row_col_info'"),
        ("llava", {"do_pan_and_scan": True}, "takes no 'do_pan_and_scan'"),
        ("qwen2_vl", {"max_pixels": "1024"}, "max_pixels: .*expected int, got str"),
        ("qwen2_vl", {"max_pixels": True}, "max_pixels: .*expected int, got bool"),
        ("qwen2_vl", {"max_pixels": None}, "max_pixels must have a value"),
        ("mistral3", {"do_pad": 1}, "do_pad: .*expected bool"),
        ("qwen2_vl", {"do_resize": False}, "takes no 'do_resize'"),
        ("llava", {"do_center_crop": False}, "takes no 'do_center_crop'"),
        # Tiles of a pixel each: half a million of them in a picture of 64x64 that the real LLaVA-NeXT is shown.
        ("llava_next", {"crop_size": {"height": 1, "width": 1}}, "takes no 'crop_size'"),
        ("llava_next", {"size": {"shortest_edge": 1}}, "takes no 'size'"),
        ("llava_onevision", {"size": {"height": 1, "width": 1}}, "takes no 'size'"),
        ("idefics3", {"max_image_size": {"longest_edge": 1}}, "takes no 'max_image_size'"),
        ("qwen2_vl", {"size": {"longest_edge": 100}}, "size: this model has it as longest_edge, shortest_edge"),
        ("gemma3", {"size": {"shortest_edge": 16}}, "size: this model has it as height, width"),
        ("llava", {"size": 28}, "size: this model has it as shortest_edge"),
        ("mistral3", {"size": {}}, "size: this model has it as longest_edge"),
        ("qwen2_vl", {"size": "large"}, "size: "),
        ("qwen2_vl", {"size": {"shortest_edge": 1, "longest_edge": 1.5}}, "size: "),
        ("qwen2_vl", {"max_pixels": 0}, "0 is not a positive number"),
        ("qwen2_vl", {"size": {"shortest_edge": -1, "longest_edge": 100}}, "-1 is not a positive number"),
        ("gemma3", {"pan_and_scan_min_ratio_to_activate": float("nan")}, "nan is not a positive number"),
        ("gemma3", {"pan_and_scan_min_ratio_to_activate": float("inf")}, "inf is not a positive number"),
    ],
)
def test_what_the_image_processor_does_not_take_is_refused(family: str, kwargs: dict[str, Any], reason: str):
    with pytest.raises(OptionError, match=reason) as raised:
        processor_of(family).options(processor_kwargs=kwargs)
    assert raised.value.name == next(iter(kwargs))
    assert isinstance(raised.value, MediaError)


@pytest.mark.parametrize(
    ("family", "kwargs", "most"),
    [
        ("qwen2_vl", {"max_pixels": 4097}, 4096),
        ("qwen2_vl", {"min_pixels": 10**9}, 4096),
        ("qwen2_vl", {"size": {"shortest_edge": 10**9, "longest_edge": 10**9}}, 4096),
        ("idefics3", {"size": {"longest_edge": 65}}, 64),
        ("internvl", {"max_patches": 7}, 6),
        ("gemma3", {"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 5}, 4),
        ("llava", {"size": {"shortest_edge": 29}}, 28),
        ("mistral3", {"size": {"longest_edge": 10**6}}, 64),
    ],
)
def test_nobody_makes_a_picture_larger_than_the_model_would(family: str, kwargs: dict[str, Any], most: int):
    with pytest.raises(OptionError, match=f"is more than the {most} that this model has itself"):
        processor_of(family).options(processor_kwargs=kwargs)


def test_the_server_may_and_moves_the_bound_for_requests():
    processor = load_picture_processor(directory_of("qwen2_vl"), {"size": {"shortest_edge": 64, "longest_edge": 8192}})
    assert processor is not None
    assert processor.layout(200, 200, ImageOptions(), 1).num_embeds > 64
    assert processor.options(processor_kwargs={"max_pixels": 8192})
    with pytest.raises(OptionError, match="more than the 8192"):
        processor.options(processor_kwargs={"max_pixels": 8193})
    with pytest.raises(OptionError, match="takes no 'device'"):
        load_picture_processor(directory_of("qwen2_vl"), {"device": "cuda"})


@pytest.mark.parametrize(
    ("family", "kwargs", "size"),
    [("qwen2_vl", {"max_pixels": 1024}, (1, 300)), ("mistral3", {"size": {"longest_edge": 1}}, (17, 15))],
)
def test_what_the_processor_itself_cannot_do_is_told_with_its_reason(
    family: str, kwargs: dict[str, Any], size: tuple[int, int]
):
    processor = processor_of(family)
    options = processor.options(processor_kwargs=kwargs)
    with pytest.raises(MediaError, match=rf"cannot take a picture of {size[1]}x{size[0]} pixels: ."):
        processor.layout(*size, options, 1)
    with pytest.raises(MediaError, match=rf"cannot take a picture of {size[1]}x{size[0]} pixels: ."):
        inputs_of(processor, np.zeros((*size, 3), np.uint8), options, 1)
