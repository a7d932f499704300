"""Prompts with pictures for the tiny vision-language models: as an engine takes them, and as transformers does.

The engine's side is made by `multimodal`, as in a frontend; the reference's by the family's real processor, which is
given the whole prompt with all of its pictures.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from engine_core import EngineRequest, SamplingParams
from ipc.vocabulary import ExtraKeySpan, MultimodalFeature
from multimodal.options import ImageOptions
from multimodal.placeholders import Placeholder
from multimodal.processor import PictureProcessor, load_picture_processor
from multimodal.processor_loading import load_transformers_processor

Inputs = dict[str, np.ndarray]

# Numbers of the prompts to test with, by family and kind: `python -m tools.choose_picture_prompts`.
NUMBERS_FILE = Path(__file__).parent.parent / "data" / "model" / "pictures.json"

# (height, width): one picture is wide, one is tall.
WIDE, TALL = (33, 47), (50, 25)
# "A" to "C" are pictures, "#" is a number that tells prompts of one kind apart.
TEMPLATES = {
    "one": "What is in this A picture? #",
    "one spot changed": "What is in this B picture? #",
    "another question": "What is in this A sketch? Say it in a few words. #",
    "first and last": "A # and then at last C",
    "twice": "Here A and again A. #",
    "touching": "These two AC touch. #",
    "text": "There is no picture here, and nothing to see but this text. #",
}


@dataclass(frozen=True)
class PicturePrompt:
    """`inputs` by feature key; `reference_inputs` are what `generate` is called with."""

    token_ids: list[int]
    features: tuple[MultimodalFeature, ...]
    spans: tuple[ExtraKeySpan, ...]
    inputs: dict[bytes, Inputs]
    reference_inputs: dict[str, torch.Tensor]

    def request(self, request_id: str, params: SamplingParams, **fields: Any) -> EngineRequest:
        return EngineRequest(
            request_id,
            self.token_ids,
            params,
            extra_key_spans=self.spans,
            mm_features=self.features,
            **fields,
        )


class PromptMaker:
    """Makes prompts for the model in `directory`, which is one of `tiny_vlms`."""

    def __init__(self, family: str, directory: Path) -> None:
        processor = load_picture_processor(directory)
        assert processor is not None
        self._processor: PictureProcessor = processor
        self._real: Any = load_transformers_processor(directory)
        self._slot = processor.image_token
        if family.startswith("qwen"):
            self._slot = f"<|vision_start|>{self._slot}<|vision_end|>"
        self.kinds = tuple(TEMPLATES)
        if family.startswith("qwen"):  # positions of pictures that touch cannot be told apart
            self.kinds = tuple(kind for kind in TEMPLATES if kind != "touching")

    def make(self, kind: str, number: int) -> PicturePrompt:
        text = TEMPLATES[kind].replace("#", str(number))
        pictures = [_PICTURES[letter] for letter in text if letter in _PICTURES]
        for letter in _PICTURES:
            text = text.replace(letter, self._slot)
        if not pictures:
            ids = self._real.tokenizer(text).input_ids
            reference = {"input_ids": torch.tensor([ids])}
            return PicturePrompt(ids, (), (), {}, reference | {"attention_mask": torch.ones(1, len(ids))})
        reference = self._real(text=[text], images=[[Image.fromarray(p) for p in pictures]], return_tensors="pt")
        prompt = self._prompt(reference["input_ids"][0].tolist(), pictures)
        prompt = replace(prompt, reference_inputs={name: _one_tensor(value) for name, value in reference.items()})
        return self._touching(prompt, pictures) if kind == "touching" else prompt

    def _prompt(self, token_ids: list[int], pictures: Sequence[np.ndarray]) -> PicturePrompt:
        """Without what the reference needs."""
        options, company = ImageOptions(), len(pictures)
        layouts = [self._processor.layout(*picture.shape[:2], options, company) for picture in pictures]
        places = self._processor.placeholders(token_ids, layouts)
        features, spans, inputs = [], [], {}
        for picture, layout, place in zip(pictures, layouts, places, strict=True):
            key = hashlib.sha256(f"{picture.shape} {layout.stands_alone} ".encode() + picture.tobytes()).digest()
            features.append(_feature(key, place, layout.num_input_bytes, layout.layout))
            inputs[key] = self._processor.model_inputs(picture, options, layout)
        for feature, (start, end) in zip(features, self._processor.mm_spans(places), strict=True):
            spans.append(ExtraKeySpan(start, end, "mm", feature.key.hex()))
        return PicturePrompt(token_ids, tuple(features), tuple(spans), inputs, {})

    def _touching(self, prompt: PicturePrompt, pictures: Sequence[np.ndarray]) -> PicturePrompt:
        """Without what most families write between two pictures."""
        left, right = prompt.features
        token_ids = prompt.token_ids[: left.end] + prompt.token_ids[right.start :]
        reference = dict(prompt.reference_inputs)
        ids = torch.tensor([token_ids])
        reference |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if "token_type_ids" in reference:
            reference["token_type_ids"] = (ids == self._processor.embed_token_id).long()
        return replace(self._prompt(token_ids, pictures), reference_inputs=reference)


def _feature(
    key: bytes, place: Placeholder, num_input_bytes: int, layout: dict[str, tuple[int, ...]]
) -> MultimodalFeature:
    return MultimodalFeature(key, place.start, place.num_tokens, place.embed_ranges, num_input_bytes, layout)


def _one_tensor(value: Any) -> torch.Tensor:
    """Some processors return a list where pictures are of several sizes."""
    return value if isinstance(value, torch.Tensor) else torch.tensor(np.asarray(value))


def _pictures() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    wide, tall = (draw.integers(0, 256, (*size, 3), dtype=np.uint8) for size in (WIDE, TALL))
    changed = wide.copy()
    changed[12:20, 20:28] ^= 255
    return {"A": wide, "B": changed, "C": tall}


_PICTURES = _pictures()
