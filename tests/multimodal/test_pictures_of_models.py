"""Pictures with all their real parts: loader, decoder, hash and the models' own processors."""

import base64
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from multimodal import (
    ContentHasher,
    ImageLimits,
    ImageOptions,
    MediaLoader,
    MediaPolicy,
    PictureError,
    Pictures,
    PictureSource,
    load_picture_processor,
)
from multimodal.options import ImageDetail
from tests.tiny_vlm_processors import save_tiny_processor


def data_url(pixels: np.ndarray, form: str = "PNG") -> str:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return f"data:image/{form.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def pixels_of(seed: int, height: int = 40, width: int = 60) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@asynccontextmanager
async def pictures_of(family: str, directory: Path) -> AsyncIterator[Pictures]:
    save_tiny_processor(family, directory)
    processor = load_picture_processor(directory)
    assert processor is not None
    pictures = Pictures(MediaLoader(MediaPolicy()), processor, ContentHasher(), ImageLimits())
    yield pictures
    await pictures.close()


@pytest.fixture(params=["qwen2_vl", "idefics3"])
async def pictures(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pictures]:
    """Of a model whose inputs are as large as the picture, and of one that cuts it into tiles."""
    async with pictures_of(request.param, tmp_path) as pictures:
        yield pictures


def sources(*urls: str, detail: ImageDetail = "auto") -> list[PictureSource]:
    return [
        PictureSource(where=f"messages[0].content[{number}]", url=url, options=ImageOptions(detail))
        for number, url in enumerate(urls)
    ]


async def test_inputs_are_those_the_processor_makes_of_the_decoded_picture(pictures: Pictures):
    cat, dog = await pictures.prepare(sources(data_url(pixels_of(1)), data_url(pixels_of(2, 33, 50))), "")
    for picture, pixels in ((cat, pixels_of(1)), (dog, pixels_of(2, 33, 50))):
        inputs = await pictures.inputs(picture)
        expected = pictures.processor.model_inputs(pixels, picture.options, picture.layout)
        assert inputs.keys() == expected.keys()
        assert all((inputs[name] == expected[name]).all() for name in expected)
        assert sum(array.nbytes for array in inputs.values()) == picture.layout.num_input_bytes


async def test_a_chat_that_goes_on_costs_what_is_new_in_it(pictures: Pictures):
    urls = [data_url(pixels_of(number)) for number in range(4)]
    made_before = 0
    for turn in range(2, 5):
        prompt = await pictures.prepare(sources(*urls[:turn]), "salt")
        for picture in prompt:
            await pictures.inputs(picture)
        assert pictures.stats.decodes == turn
        assert pictures.stats.processor_calls == turn
        assert pictures.stats.input_bytes_made > made_before
        made_before = pictures.stats.input_bytes_made


async def test_what_shows_the_model_the_same_is_the_same_and_nothing_else(pictures: Pictures):
    pixels = pixels_of(1, 40, 40)
    changed = pixels.copy()
    changed[39, 39, 0] ^= 1
    seen = [pixels, changed, np.rot90(pixels), np.flip(pixels, 1), np.ascontiguousarray(pixels.reshape(20, 80, 3))]
    prompt = await pictures.prepare(sources(*map(data_url, seen)), "")
    assert len({picture.content_hash for picture in prompt}) == len(seen)
    # In another file, turned four times, and with a word that changes nothing.
    again = await pictures.prepare(sources(data_url(pixels, "BMP"), data_url(np.rot90(pixels, 4), "TIFF")), "")
    high = await pictures.prepare(sources(*[data_url(pixels)] * 2, detail="high"), "")
    assert {picture.content_hash for picture in again + high} == {prompt[0].content_hash}
    low = await pictures.prepare(sources(*[data_url(pixels)] * 2, detail="low"), "")
    assert low[0].content_hash != prompt[0].content_hash


async def test_company_changes_nothing(pictures: Pictures):
    [alone] = await pictures.prepare(sources(data_url(pixels_of(1))), "")
    beside, _ = await pictures.prepare(sources(data_url(pixels_of(1)), data_url(pixels_of(2))), "")
    assert alone.key == beside.key
    assert await pictures.inputs(alone) is await pictures.inputs(beside)


async def test_except_to_llava_onevision(tmp_path: Path):
    async with pictures_of("llava_onevision", tmp_path) as pictures:
        urls = [data_url(pixels_of(number, 90, 30)) for number in range(3)]
        [alone] = await pictures.prepare(sources(urls[0]), "")
        of_two = await pictures.prepare(sources(*urls[:2]), "")
        of_three = await pictures.prepare(sources(*urls), "")
        assert alone.content_hash != of_two[0].content_hash == of_three[0].content_hash
        assert (await pictures.inputs(alone))["pixel_values"].shape != (await pictures.inputs(of_two[0]))[
            "pixel_values"
        ].shape


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:image/png;base64,", "empty"),
        ("data:image/png;base64,PGh0bWw+", "image"),
        ("file:///etc/passwd", "file"),
        ("http://127.0.0.1/cat.png", "other hosts"),
        ("gopher://cat", "gopher"),
    ],
)
async def test_what_cannot_be_used_names_the_picture(pictures: Pictures, url: str, reason: str):
    with pytest.raises(PictureError, match=reason) as caught:
        await pictures.prepare(sources(data_url(pixels_of(1)), url), "")
    assert caught.value.where == "messages[0].content[1]"
