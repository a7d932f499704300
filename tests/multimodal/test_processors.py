"""Ids, ranges and inputs are those of `processor(text=…, images=…)`, for every family, over sizes and companies."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image

from multimodal.errors import MediaError
from multimodal.layout import ImageLayout
from multimodal.options import ImageOptions
from multimodal.processor import load_picture_processor
from multimodal.processor_loading import ProcessorLoadError
from tests.multimodal.families import (
    EMBEDDED_TOKENS,
    Reference,
    directory_of,
    inputs_of,
    picture,
    processor_of,
    real_processor_of,
    reference,
)
from tests.tiny_vlm_processors import FAMILIES

PLAIN = ImageOptions()
# Heights and widths: squares, tiles' borders and their neighbours, a pixel wide or high, and shapes no family likes.
SIZES = [
    *[(1, 1), (1, 2), (2, 1), (1, 40), (40, 1), (3, 3), (3, 4), (4, 3), (9, 13), (13, 9), (16, 16), (16, 17), (17, 16)],
    *[(28, 28), (28, 29), (29, 57), (40, 60), (60, 40), (56, 56), (84, 28), (28, 85), (30, 100), (100, 30), (64, 64)],
    *[(65, 33), (33, 129), (112, 112), (150, 7), (3, 200), (200, 3), (1, 250), (250, 1)],
]


def prompt_of(family: str, *texts: str) -> str:
    """The texts, with a picture between each two."""
    return processor_of(family).image_token.join(texts)


def assert_equal_to_reference(family: str, text: str, pictures: list[np.ndarray], expected: Reference) -> None:
    """Ids, ranges and inputs, made of each picture alone as a server makes them."""
    processor = processor_of(family)
    layouts = [processor.layout(*pixels.shape[:2], PLAIN, len(pictures)) for pixels in pictures]
    token_ids = ids_of(family, processor.expand(text, layouts))
    assert token_ids == expected.token_ids
    found = processor.placeholders(token_ids, layouts)
    assert [(place.start, place.end) for place in found] == expected.ranges
    for place, positions, layout in zip(found, expected.embedded, layouts, strict=True):
        assert [place.start + i for first, end in place.embed_ranges for i in range(first, end)] == positions
        assert place.num_tokens == place.embed_ranges[-1][1] and place.embed_ranges[0][0] == 0
        assert layout.num_embeds == len(positions)
    made = [inputs_of(processor, pixels, PLAIN, len(pictures)) for pixels in pictures]
    for inputs, layout in zip(made, layouts, strict=True):
        assert sum(array.nbytes for array in inputs.values()) == layout.num_input_bytes
        assert set(inputs) == set(expected.inputs)
    for number, part in enumerate(own_parts(family, expected.inputs, layouts)):
        for name, array in part.items():
            np.testing.assert_array_equal(made[number][name], array, err_msg=f"{name} of picture {number}")
            assert made[number][name].dtype == array.dtype


def ids_of(family: str, text: str) -> list[int]:
    backend = transformers.AutoTokenizer.from_pretrained(directory_of(family)).backend_tokenizer
    return backend.encode(text, add_special_tokens=False).ids


def own_parts(family: str, inputs: dict[str, np.ndarray], layouts: list[ImageLayout]) -> list[dict[str, np.ndarray]]:
    """What each picture has of the inputs of a whole prompt, the padding to others' sizes cut off (and checked)."""
    parts: list[dict[str, np.ndarray]] = []
    begin = 0
    for number, layout in enumerate(layouts):
        part: dict[str, np.ndarray] = {}
        shapes = layout.input_shapes
        for name, whole in inputs.items():
            shape = shapes[name]
            match family:
                case "qwen2_vl" | "qwen2_5_vl" | "qwen3_vl" | "internvl" | "gemma3" if name == "pixel_values":
                    part[name] = whole[begin : begin + shape[0]]  # patches or crops of all pictures in a row
                case "idefics3" | "smolvlm":
                    part[name] = whole[:, begin : begin + shape[1]]  # tiles of all pictures in a row
                case "llava_onevision" if name == "batch_num_images":
                    part[name] = np.minimum(whole, 2)  # two stand for several
                case _:
                    cut = tuple(slice(0, length) for length in shape[1:])
                    own = whole[number : number + 1]
                    part[name] = own[(slice(None), *cut)]
                    assert np.count_nonzero(own) == np.count_nonzero(part[name])
        begin += shapes["pixel_values"][1 if family in {"idefics3", "smolvlm"} else 0]
        parts.append(part)
    return parts


@pytest.mark.parametrize("family", FAMILIES)
def test_one_picture_of_any_size(family: str):
    text = prompt_of(family, "What is in this picture?\n", " Describe it.")
    refused = []
    for height, width in SIZES:
        pixels = picture(height, width)
        try:
            expected = reference(family, text, [pixels])
        except Exception:
            refused.append((height, width))
            with pytest.raises(MediaError, match=f"{width}x{height} pixels"):
                processor_of(family).layout(height, width, PLAIN, 1)
            with pytest.raises(MediaError):
                inputs_of(processor_of(family), pixels, PLAIN, 1)
        else:
            assert_equal_to_reference(family, text, [pixels], expected)
    assert len(SIZES) - len(refused) >= 20, refused


@pytest.mark.parametrize("family", FAMILIES)
def test_several_pictures_of_several_sizes_with_text_around_and_between(family: str):
    sizes = [(40, 60), (30, 100), (40, 60), (64, 17)]
    pictures = [picture(*size, seed=seed) for seed, size in enumerate(sizes)]
    text = prompt_of(family, "Compare ", " with ", "\n\n", " and\n", "")
    assert_equal_to_reference(family, text, pictures, reference(family, text, pictures))


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_that_touch_and_nothing_around_them(family: str):
    pictures = [picture(33, 48), picture(48, 33), picture(16, 16)]
    text = prompt_of(family, "", "", "", "")
    assert_equal_to_reference(family, text, pictures, reference(family, text, pictures))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_picture_twice_has_the_same_inputs_and_two_places(family: str):
    pixels = picture(40, 60)
    text = prompt_of(family, "a", "b", "c")
    assert_equal_to_reference(family, text, [pixels, pixels], reference(family, text, [pixels, pixels]))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chat_template_puts_in_the_token_that_becomes_the_picture(family: str):
    tokenizer = real_processor_of(family).tokenizer
    content = [{"type": "text", "text": "Left: "}, {"type": "image"}, {"type": "text", "text": "."}, {"type": "image"}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}, {"role": "assistant", "content": "Yes."}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert text.count(processor_of(family).image_token) == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_what_must_not_be_spelled_by_users(family: str):
    processor, tokenizer = processor_of(family), real_processor_of(family).tokenizer
    assert {processor.image_token, EMBEDDED_TOKENS[family]} <= set(processor.spellings)
    assert processor.embed_token_id == tokenizer.convert_tokens_to_ids(EMBEDDED_TOKENS[family])
    assert processor.embed_token_id in processor.placeholder_ids
    assert set(processor.spellings) <= set(tokenizer.get_vocab()), "what is no token is text"
    video_tokens = {"<video>", "<|video_pad|>"} & set(tokenizer.get_vocab())
    assert video_tokens <= set(processor.spellings)
    if family != "internvl":  # whose videos are made of image tokens
        assert set(tokenizer.convert_tokens_to_ids(sorted(video_tokens))) <= processor.placeholder_ids


def test_the_numbers_that_positions_depend_on():
    for family in FAMILIES:
        layout = processor_of(family).layout(40, 60, PLAIN, 1).layout
        if family.startswith("qwen"):
            expected = reference(family, prompt_of(family, "", ""), [picture(40, 60)])
            assert layout == {"image_grid_thw": tuple(expected.inputs["image_grid_thw"][0])}
            assert all(type(number) is int for number in layout["image_grid_thw"])
        else:
            assert layout == {}


def test_company_matters_to_llava_onevision_alone():
    for family in FAMILIES:
        alone, with_another, with_many = (processor_of(family).layout(40, 60, PLAIN, n) for n in (1, 2, 7))
        if family == "llava_onevision":
            assert (alone.stands_alone, with_another.stands_alone) == (True, False)
            assert alone.num_embeds > with_another.num_embeds
        else:
            assert alone.stands_alone is None
            assert alone == with_another
        assert with_another == with_many


def test_layouts_are_right_also_where_the_quick_way_to_them_is_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("multimodal.real_processor._QUICKLY", {"do_resize": False})
    processor = load_picture_processor(directory_of("llava"))
    assert processor is not None
    assert processor.layout(40, 61, PLAIN, 1) == processor_of("llava").layout(40, 61, PLAIN, 1)


def test_inputs_of_other_shapes_than_foretold_are_never_given_out():
    processor = processor_of("qwen2_vl")
    wrong = processor.layout(40, 60, PLAIN, 1)
    with pytest.raises(RuntimeError, match=r"of a picture of 40x60, and .* of a blank one"):
        processor.model_inputs(picture(60, 40), PLAIN, wrong)


@pytest.mark.parametrize("family", ["qwen2_vl", "idefics3", "gemma3"])
def test_many_threads_get_what_one_gets(family: str):
    processor = load_picture_processor(directory_of(family))
    assert processor is not None
    sizes = [(20 + i % 7, 30 + i % 5) for i in range(40)]

    def work(size: tuple[int, int]) -> tuple[ImageLayout, dict[str, np.ndarray]]:
        return processor.layout(*size, PLAIN, 2), inputs_of(processor, picture(*size), PLAIN, 2)

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, sizes))
    for size, (layout, inputs) in zip(sizes, results, strict=True):
        assert layout == processor_of(family).layout(*size, PLAIN, 2)
        for name, expected in inputs_of(processor_of(family), picture(*size), PLAIN, 2).items():
            np.testing.assert_array_equal(inputs[name], expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_low_detail_shrinks_what_is_large_before_the_processor_sees_it(family: str):
    processor, low = processor_of(family), processor_of(family).options("low")
    small = picture(40, 60)
    assert processor.layout(40, 60, low, 1) == processor.layout(40, 60, PLAIN, 1)
    np.testing.assert_array_equal(
        inputs_of(processor, small, low, 1)["pixel_values"], inputs_of(processor, small, PLAIN, 1)["pixel_values"]
    )
    large = picture(500, 1500)
    shrunk = np.asarray(Image.fromarray(large).resize((512, 171), Image.Resampling.BICUBIC))
    assert processor.layout(500, 1500, low, 1) == processor.layout(171, 512, PLAIN, 1)
    for name, array in inputs_of(processor, large, low, 1).items():
        np.testing.assert_array_equal(array, inputs_of(processor, shrunk, PLAIN, 1)[name])


@pytest.mark.parametrize("size", [(100, 10), (10, 100), (60, 60), (30, 20), (64, 8)])
@pytest.mark.parametrize(
    ("family", "kwargs"),
    [
        ("gemma3", {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8, "pan_and_scan_max_num_crops": 3}),
        ("qwen2_vl", {"min_pixels": 64, "max_pixels": 1024}),
        ("qwen3_vl", {"size": {"shortest_edge": 144, "longest_edge": 2000}}),
        ("idefics3", {"do_image_splitting": False}),
        ("smolvlm", {"size": {"longest_edge": 32}}),
        ("internvl", {"crop_to_patches": False}),
        ("internvl", {"max_patches": 2}),
        ("mistral3", {"size": {"longest_edge": 32}}),
    ],
)
def test_the_processors_own_options(family: str, kwargs: dict[str, Any], size: tuple[int, int]):
    processor = processor_of(family)
    options = processor.options(processor_kwargs=kwargs)
    pixels = picture(*size)
    text = prompt_of(family, "One ", " two ", " three")
    expected = reference(family, text, [pixels, pixels], **kwargs)
    layouts = [processor.layout(*size, options, 2)] * 2
    token_ids = ids_of(family, processor.expand(text, layouts))
    assert token_ids == expected.token_ids
    assert [(place.start, place.end) for place in processor.placeholders(token_ids, layouts)] == expected.ranges
    made = inputs_of(processor, pixels, options, 2)
    for part in own_parts(family, expected.inputs, layouts):
        for name in made:
            np.testing.assert_array_equal(made[name], part[name])
    if size == (60, 60) and family != "gemma3":  # which looks closer at long ones
        assert layouts[0] != processor.layout(*size, PLAIN, 2), "the option made no difference"


@pytest.mark.parametrize(
    ("family", "size", "num_images"),
    [
        ("llava", (1, 200_000), 1),  # its shorter side becomes 28
        ("llava_onevision", (100, 12_000), 2),  # made a square first, in company
    ],
)
def test_what_would_be_blown_up_beyond_measure_is_refused(family: str, size: tuple[int, int], num_images: int):
    processor = processor_of(family)
    with pytest.raises(MediaError, match=f"{size[1]}x{size[0]} pixels is too long and narrow for this model"):
        processor.layout(*size, PLAIN, num_images)
    assert processor.layout(100, 12_000, PLAIN, 1)


def test_the_server_can_choose_other_values_than_the_model_has():
    processor = load_picture_processor(directory_of("qwen2_vl"), {"max_pixels": 1024})
    assert processor is not None
    requested = processor_of("qwen2_vl").options(processor_kwargs={"max_pixels": 1024})
    assert processor.layout(100, 100, PLAIN, 1) == processor_of("qwen2_vl").layout(100, 100, requested, 1)
    assert processor.fingerprint != processor_of("qwen2_vl").fingerprint


def test_fingerprints_tell_processors_apart_and_nothing_else(tmp_path: Path):
    assert len({processor_of(family).fingerprint for family in FAMILIES}) == len(FAMILIES)
    again = load_picture_processor(directory_of("gemma3"))
    assert again is not None and again.fingerprint == processor_of("gemma3").fingerprint


@pytest.mark.parametrize("family", ["llava", "llava_next", "idefics3", "gemma3"])
def test_the_processor_is_the_one_that_transformers_loads(family: str):
    theirs = transformers.AutoProcessor.from_pretrained(directory_of(family))
    text, pixels = prompt_of(family, "a ", " b"), picture(40, 60)
    ours = reference(family, text, [pixels])
    made = theirs(text=[text], images=[[Image.fromarray(pixels)]], return_tensors="np", add_special_tokens=False)
    assert made["input_ids"][0].tolist() == ours.token_ids
    for name, array in ours.inputs.items():
        np.testing.assert_array_equal(made[name], array)


def test_no_torch_is_needed():
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path; from multimodal.processor import *; import numpy as np\n"
        "for path in sys.argv[1:]:\n"
        "    processor = load_picture_processor(Path(path))\n"
        "    layout = processor.layout(40, 60, ImageOptions(), 1)\n"
        "    inputs = processor.model_inputs(np.zeros((40, 60, 3), np.uint8), ImageOptions(), layout)\n"
        "    print(layout.num_embeds, *sorted(inputs))\n"
    )
    directories = [str(directory_of(family)) for family in FAMILIES]
    done = subprocess.run(
        [sys.executable, "-c", script, *directories], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for family, line in zip(FAMILIES, done.stdout.splitlines(), strict=True):
        layout = processor_of(family).layout(40, 60, PLAIN, 1)
        assert line.split() == [str(layout.num_embeds), *sorted(layout.input_shapes)]


def test_a_model_without_pictures_has_no_processor(tmp_path: Path):
    real_processor_of("llava").tokenizer.save_pretrained(tmp_path)
    assert load_picture_processor(tmp_path) is None
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert load_picture_processor(tmp_path) is None


def test_a_processor_of_sounds_is_none_of_pictures(tmp_path: Path):
    (tmp_path / "preprocessor_config.json").write_text('{"processor_class": "WhisperProcessor"}')
    assert load_picture_processor(tmp_path) is None


def test_the_class_may_be_known_by_the_model_alone(tmp_path: Path):
    for path in directory_of("qwen2_vl").iterdir():
        (tmp_path / path.name).write_text(path.read_text().replace('"processor_class"', '"was"'))
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_vl"}')
    processor = load_picture_processor(tmp_path)
    assert processor is not None
    assert processor.layout(40, 60, PLAIN, 1) == processor_of("qwen2_vl").layout(40, 60, PLAIN, 1)


@pytest.mark.parametrize(
    ("family", "file", "old", "new", "reason"),
    [
        ("llava", "processor_config.json", "LlavaProcessor", "LlavaProcessorOfTomorrow", "LlavaProcessorOfTomorrow"),
        ("llava", "preprocessor_config.json", "CLIPImageProcessor", "NoImageProcessor", "Unrecognized image processor"),
        ("llava", "processor_config.json", "{", "not JSON", "no picture processor could be built"),
        ("llava", "tokenizer.json", "<image>", "<bild>", "the tokenizer has no token of its own for '<image>'"),
        ("gemma3", "tokenizer_config.json", "boi_token", "token", "boi_token"),
        ("llava", "processor_config.json", '"patch_size": 7', '"patch_size": 70', "sees nothing"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(
    tmp_path: Path, family: str, file: str, old: str, new: str, reason: str
):
    for path in directory_of(family).iterdir():
        text = path.read_text()
        assert path.name != file or old in text
        (tmp_path / path.name).write_text(text.replace(old, new) if path.name == file else text)
    with pytest.raises(ProcessorLoadError, match=reason):
        load_picture_processor(tmp_path)


def test_a_model_that_embeds_another_token_is_refused(tmp_path: Path):
    for path in directory_of("llava").iterdir():
        (tmp_path / path.name).write_text(path.read_text())
    token_id = processor_of("llava").embed_token_id
    (tmp_path / "config.json").write_text(f'{{"model_type": "llava", "image_token_index": {token_id}}}')
    assert load_picture_processor(tmp_path) is not None
    (tmp_path / "config.json").write_text(f'{{"model_type": "llava", "image_token_index": {token_id + 1}}}')
    with pytest.raises(ProcessorLoadError, match=f"image_token_index {token_id + 1}, its processor {token_id}"):
        load_picture_processor(tmp_path)
