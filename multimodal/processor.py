"""Pictures through a model's own processor: how many tokens by size alone, model inputs from pixels.

The rule is equality: the ids, ranges and inputs that come of this are those of `processor(text=…, images=[[…]])` in
transformers, for one conversation with all its pictures. Without pixels the real processor runs once on a blank
picture for each (size, options), and what it made of it is remembered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from .errors import MediaError
from .layout import ImageLayout
from .options import (
    LOW_DETAIL_SIDE,
    ImageOptions,
    OptionError,
    canonical_json,
    check_detail,
    check_processor_kwargs,
)
from .placeholders import Placeholder, content_spans, expand, find_placeholders
from .processor_loading import ProcessorLoadError, load_transformers_processor
from .real_processor import RealProcessor

if TYPE_CHECKING:
    from transformers import ProcessorMixin

# Families that let the tokens of a picture, and of pictures that touch, see each other in both directions.
_JOIN_TOUCHING = frozenset({"Gemma3Processor"})
# The inputs that decide positions, not only embeddings (`get_rope_index`).
_LAYOUT_INPUTS = frozenset({"image_grid_thw"})
_MODALITIES = ("image", "video", "audio")


def load_picture_processor(
    model_dir: Path, processor_kwargs: Mapping[str, Any] | None = None
) -> PictureProcessor | None:
    """Load the processor of a local transformers directory; None if its model takes no pictures. No torch is needed.

    `processor_kwargs` take the place of the model's own values; requests choose within them.

    Raises:
        ProcessorLoadError: the model takes pictures, but not through a processor that can be used here.
        OptionError: the image processor takes no such `processor_kwargs`.
    """
    real = load_transformers_processor(model_dir)
    if real is None:
        return None
    try:
        processor = PictureProcessor(real, processor_kwargs or {})
    except (ProcessorLoadError, OptionError):
        raise
    except Exception as error:  # a processor of another shape: no image token, no text to put in its place
        raise ProcessorLoadError(f"{type(real).__name__} cannot be used for pictures: {error}") from error
    path = model_dir / "config.json"
    config = json.loads(path.read_bytes()) if path.is_file() else {}
    for name in ("image_token_id", "image_token_index"):
        if (model_id := config.get(name, processor.embed_token_id)) != processor.embed_token_id:
            raise ProcessorLoadError(
                f"in {model_dir} the model has the {name} {model_id}, its processor {processor.embed_token_id}"
            )
    return processor


class PictureProcessor:
    """A model's processor, for pictures one at a time. All methods may be called from several threads at once.

    Attributes:
        image_token: in a rendered prompt, each occurrence is a picture.
        embed_token_id: the token that stands for one row of the encoder's output.
        placeholder_ids: token ids that the model takes for parts of pictures, videos or sounds.
        spellings: texts that would become such tokens, and which no user's text may therefore have.
        joins_touching: whether pictures that touch see each other (`mm_spans`).
        fingerprint: equal where equal pixels and options give equal inputs.

    Raises:
        ProcessorLoadError: the tokenizer does not know the processor's image token.
        OptionError: the image processor takes no such `processor_kwargs`.
    """

    def __init__(self, processor: ProcessorMixin, processor_kwargs: Mapping[str, Any]) -> None:
        accepted = processor.image_processor.valid_kwargs
        self._real = RealProcessor(processor, check_processor_kwargs(processor_kwargs, accepted))
        self._tokenizer = processor.tokenizer.backend_tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

        self.image_token: str = processor.image_token
        # The first of a modality's ids is the one that is embedded; others mark rows and ends.
        self.embed_token_id: int = processor.image_token_ids[0]
        ids = [getattr(processor, f"{modality}_token_ids")[0] for modality in _MODALITIES]
        self.placeholder_ids = frozenset(id for id in ids if id is not None)
        texts = [getattr(processor, f"{modality}_token", None) for modality in _MODALITIES]
        texts += processor.tokenizer.convert_ids_to_tokens(sorted(self.placeholder_ids))
        # A text that is no token of this tokenizer is only text.
        tokens = {str(token) for token in self._tokenizer.get_added_tokens_decoder().values()}
        self.spellings = tuple(sorted(tokens.intersection(texts)))
        self.joins_touching = type(processor).__name__ in _JOIN_TOUCHING
        self.fingerprint = self._real.fingerprint
        for text in (self.image_token, processor.tokenizer.convert_ids_to_tokens(self.embed_token_id)):
            if text not in tokens:
                raise ProcessorLoadError(f"the tokenizer has no token of its own for {text!r}")
        self.layout(64, 64, ImageOptions(), 1)

    def options(self, detail: str = "auto", processor_kwargs: Mapping[str, Any] | None = None) -> ImageOptions:
        """Check what a request wants of its pictures.

        Raises:
            OptionError: an unknown `detail`; arguments that the image processor does not take, that are not the
                caller's to choose, of the wrong type, or larger than the model's own.
        """
        checked = check_processor_kwargs(processor_kwargs or {}, self._real.accepted, self._real.own_values)
        return ImageOptions(check_detail(detail), canonical_json(checked))

    def layout(self, height: int, width: int, options: ImageOptions, num_images: int) -> ImageLayout:
        """What the processor makes of a picture of `height` × `width` pixels, one of the `num_images` of its prompt.

        It costs a good part of what processing a picture does. Nothing is remembered here: who asked for which size is
        for callers to keep apart (`KnownLayouts`).

        Raises:
            MediaError: the processor does not take a picture of this size.
        """
        if options.shrinks:
            height, width = _fit(height, width, LOW_DETAIL_SIDE)
        stands_alone = num_images == 1 if self._real.company_matters else None
        return self._layout(height, width, options.processor_kwargs, stands_alone)

    def model_inputs(self, pixels: np.ndarray, options: ImageOptions, layout: ImageLayout) -> dict[str, np.ndarray]:
        """The inputs of one picture, `pixels` [height, width, 3] uint8, by the arguments of `get_image_features`.

        They are what the processor makes of it in its prompt, without the padding that brings the prompt's pictures to
        one size, and of the shapes that `layout` (of its size, options and prompt) told.

        Raises:
            MediaError: the processor does not take the picture.
        """
        height, width = pixels.shape[:2]
        image = Image.fromarray(pixels)
        if options.shrinks:
            shrunk_height, shrunk_width = _fit(height, width, LOW_DETAIL_SIDE)
            if (shrunk_height, shrunk_width) != (height, width):
                image = image.resize((shrunk_width, shrunk_height), Image.Resampling.BICUBIC)
        made = self._real.make(image, json.loads(options.processor_kwargs), stands_alone=layout.stands_alone)
        told = (layout.replacement, layout.input_shapes, layout.layout)
        if (made.replacement, made.shapes, _layout_numbers(made.inputs)) != told:
            raise RuntimeError(
                f"the processor made {made.shapes} of a picture of {width}x{height}, and {layout.input_shapes} of a "
                "blank one: it looks at more than a picture's size"
            )
        return made.inputs

    def expand(self, text: str, layouts: Sequence[ImageLayout]) -> str:
        """Put what stands for the i-th picture in the place of the i-th image token of `text`.

        Raises:
            PlaceholderError: there are not as many image tokens as pictures.
        """
        return expand(text, self.image_token, layouts)

    def placeholders(self, token_ids: Sequence[int], layouts: Sequence[ImageLayout]) -> list[Placeholder]:
        """Find the tokens of each picture in the tokenized text that `expand` made.

        Raises:
            PlaceholderError: there are more or fewer, or they are not where they should be.
        """
        return find_placeholders(token_ids, self.embed_token_id, layouts)

    def mm_spans(self, placeholders: Sequence[Placeholder]) -> list[tuple[int, int]]:
        """For each picture the positions `[start, end)` whose keys and values its content decides."""
        return content_spans(placeholders, joins_touching=self.joins_touching)

    def _layout(self, height: int, width: int, processor_kwargs: str, stands_alone: bool | None) -> ImageLayout:
        made = self._real.make_of_blank(height, width, json.loads(processor_kwargs), stands_alone=stands_alone)
        (tokens,) = self._tokenizer.encode_batch_fast([made.replacement], add_special_tokens=False)
        embedded = np.asarray(tokens.ids) == self.embed_token_id
        edges = np.flatnonzero(np.diff(embedded, prepend=False, append=False))
        if not len(edges):
            raise MediaError(f"this model sees nothing in a picture of {width}x{height} pixels")
        inputs = made.inputs
        return ImageLayout(
            replacement=made.replacement,
            embed_runs=tuple((edges[1::2] - edges[::2]).tolist()),
            input_shapes=made.shapes,
            num_input_bytes=sum(self._real.item_bytes[name] * array.size for name, array in inputs.items()),
            layout=_layout_numbers(inputs),
            stands_alone=stands_alone,
        )


def _layout_numbers(inputs: Mapping[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(inputs[name].ravel().tolist()) for name in sorted(_LAYOUT_INPUTS & inputs.keys())}


def _fit(height: int, width: int, side: int) -> tuple[int, int]:
    """The size of a picture shrunk to fit a square of `side` pixels; its own where it does."""
    longest = max(height, width)
    if longest <= side:
        return height, width
    return max(1, round(height * side / longest)), max(1, round(width * side / longest))
