"""Each family's processor, made once per run, and what transformers' own call makes of a prompt with pictures."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from multimodal.options import ImageOptions
from multimodal.processor import PictureProcessor, load_picture_processor
from multimodal.processor_loading import load_transformers_processor
from tests.tiny_vlm_processors import save_tiny_processor

# The token whose embeddings the model replaces; where a picture is put in the text it is mostly the same one.
EMBEDDED_TOKENS = {
    "llava": "<image>",
    "llava_next": "<image>",
    "llava_onevision": "<image>",
    "qwen2_vl": "<|image_pad|>",
    "qwen2_5_vl": "<|image_pad|>",
    "qwen3_vl": "<|image_pad|>",
    "idefics3": "<image>",
    "smolvlm": "<image>",
    "internvl": "<IMG_CONTEXT>",
    "gemma3": "<image_soft_token>",
    "mistral3": "[IMG]",
}
_NOT_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets")


@functools.cache
def directory_of(family: str) -> Path:
    # Kept until the run ends; the files are small.
    directory = Path(_root().name) / family
    save_tiny_processor(family, directory)
    return directory


@functools.cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="foreword-tiny-processors-")


@functools.cache
def processor_of(family: str) -> PictureProcessor:
    processor = load_picture_processor(directory_of(family))
    assert processor is not None
    return processor


def inputs_of(
    processor: PictureProcessor, pixels: np.ndarray, options: ImageOptions, num_images: int
) -> dict[str, np.ndarray]:
    """The inputs of one of `num_images` pictures."""
    return processor.model_inputs(pixels, options, processor.layout(*pixels.shape[:2], options, num_images))


@functools.cache
def real_processor_of(family: str) -> Any:
    return load_transformers_processor(directory_of(family))


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((height, width, seed)).integers(0, 256, (height, width, 3), dtype=np.uint8)


@dataclass(frozen=True)
class Reference:
    """`ranges` are (first embedded token, one past the last one) of each picture, `embedded` all its embedded ones."""

    token_ids: list[int]
    embedded: list[list[int]]
    inputs: dict[str, np.ndarray]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return [(positions[0], positions[-1] + 1) for positions in self.embedded]


def reference(family: str, text: str, pictures: list[np.ndarray], **images_kwargs: Any) -> Reference:
    """`processor(text=…, images=[[…]])`. Where each picture is comes from the characters its replacement fills."""
    processor = real_processor_of(family)
    made = processor(
        text=[text],
        images=[[Image.fromarray(pixels) for pixels in pictures]],
        images_kwargs=images_kwargs,
        return_tensors="np",
        return_text_replacement_offsets=True,
        add_special_tokens=False,
    )
    token_ids = made["input_ids"][0].tolist()
    (replaced,) = made["text_replacement_offsets"]
    shift, expanded = 0, text
    for part in replaced:
        start, end = part["span"]
        expanded = expanded[: start + shift] + part["replacement"] + expanded[end + shift :]
        shift += len(part["replacement"]) - (end - start)
    encoded = processor.tokenizer(expanded, add_special_tokens=False, return_offsets_mapping=True)
    assert encoded["input_ids"] == token_ids
    embed_id = processor.tokenizer.convert_tokens_to_ids(EMBEDDED_TOKENS[family])
    embedded = [
        [
            position
            for position, (start, end) in enumerate(encoded["offset_mapping"])
            if part["new_span"][0] <= start and end <= part["new_span"][1] and token_ids[position] == embed_id
        ]
        for part in replaced
    ]
    return Reference(token_ids, embedded, {name: made[name] for name in made if name not in _NOT_INPUTS})
