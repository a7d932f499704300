"""Pictures through a model's own processor: how many tokens by size alone, model inputs from pixels.

The rule is equality: the ids, ranges and inputs that come of this are those of `processor(text=…, images=[[…]])` in
transformers, for one conversation with all its pictures. Without pixels the real processor runs once on a blank
picture for each (size, options), and what it made of it is remembered.
"""

from __future__ import annotations

import functools
import hashlib
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

if TYPE_CHECKING:
    from transformers import ProcessorMixin

# Sizes whose layouts are remembered. One weighs as much as its replacement: kilobytes, for the largest pictures 200 KB.
_MAX_LAYOUTS = 256
# Families that let the tokens of a picture, and of pictures that touch, see each other in both directions.
_JOIN_TOUCHING = frozenset({"Gemma3Processor"})
# The inputs that decide positions, not only embeddings (`get_rope_index`).
_LAYOUT_INPUTS = frozenset({"image_grid_thw"})
# How many pictures each conversation has: an input of models that see a picture otherwise in company.
_COMPANY_INPUT = "batch_num_images"
_MODALITIES = ("image", "video", "audio")
_PROBE_SIDE = 64


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
        processor.layout(_PROBE_SIDE, _PROBE_SIDE, ImageOptions(), 1)
    except OptionError:
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
    """

    def __init__(self, real: ProcessorMixin, processor_kwargs: Mapping[str, Any]) -> None:
        self._real = real
        self._accepted: type = real.image_processor.valid_kwargs
        self._server_kwargs = check_processor_kwargs(processor_kwargs, self._accepted)
        own = {name: getattr(real.image_processor, name, None) for name in self._accepted.__annotations__}
        self._own_values: dict[str, Any] = own | self._images_kwargs("{}")
        self._backend = real.tokenizer.backend_tokenizer
        self._company_matters = _COMPANY_INPUT in real.image_processor.model_input_names
        self._remembered_layout = functools.lru_cache(maxsize=_MAX_LAYOUTS)(self._layout)

        self.image_token: str = real.image_token
        self.embed_token_id: int = real.image_token_ids[0]
        # The first of a modality's ids is the one that is embedded; others mark rows and ends.
        ids = [getattr(real, f"{modality}_token_ids")[0] for modality in _MODALITIES]
        self.placeholder_ids = frozenset(id for id in ids if id is not None)
        tokens = [getattr(real, f"{modality}_token", None) for modality in _MODALITIES]
        tokens += real.tokenizer.convert_ids_to_tokens(sorted(self.placeholder_ids))
        self.spellings = tuple(
            sorted({token for token in tokens if token and self._backend.token_to_id(token) is not None})
        )
        self.joins_touching = type(real).__name__ in _JOIN_TOUCHING
        self.fingerprint = _fingerprint(real, self._server_kwargs)

    def options(self, detail: str = "auto", processor_kwargs: Mapping[str, Any] | None = None) -> ImageOptions:
        """Check what a request wants of its pictures.

        Raises:
            OptionError: an unknown `detail`; arguments that the image processor does not take, that are not the
                caller's to choose, of the wrong type, or larger than the model's own.
        """
        checked = check_processor_kwargs(processor_kwargs or {}, self._accepted, self._own_values)
        return ImageOptions(check_detail(detail), canonical_json(checked))

    def layout(self, height: int, width: int, options: ImageOptions, num_images: int) -> ImageLayout:
        """What the processor makes of a picture of `height` × `width` pixels, one of the `num_images` of its prompt.

        The first picture of a size costs as much as processing it.

        Raises:
            MediaError: the processor does not take a picture of this size.
        """
        if options.shrinks:
            height, width = _fit(height, width, LOW_DETAIL_SIDE)
        return self._remembered_layout(height, width, options.processor_kwargs, self._stands_alone(num_images))

    def model_inputs(self, pixels: np.ndarray, options: ImageOptions, num_images: int) -> dict[str, np.ndarray]:
        """The inputs of one picture, `pixels` [height, width, 3] uint8, by the arguments of `get_image_features`.

        They are what the processor makes of it among the `num_images` of its prompt, without the padding that brings
        others of them to one size, and of the shapes that `layout` told.

        Raises:
            MediaError: the processor does not take the picture.
        """
        height, width = pixels.shape[:2]
        layout = self.layout(height, width, options, num_images)
        image = Image.fromarray(pixels)
        if options.shrinks:
            shrunk_height, shrunk_width = _fit(height, width, LOW_DETAIL_SIDE)
            if (shrunk_height, shrunk_width) != (height, width):
                image = image.resize((shrunk_width, shrunk_height), Image.Resampling.BICUBIC)
        replacement, inputs = self._process(image, options.processor_kwargs, layout.stands_alone)
        shapes = {name: array.shape for name, array in inputs.items()}
        if (replacement, shapes) != (layout.replacement, layout.input_shapes):
            raise RuntimeError(
                f"{type(self._real).__name__} made {shapes} of a picture of {width}x{height}, and "
                f"{layout.input_shapes} of a blank one: this processor looks at more than a picture's size"
            )
        return inputs

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

    def _stands_alone(self, num_images: int) -> bool | None:
        return num_images == 1 if self._company_matters else None

    def _layout(self, height: int, width: int, processor_kwargs: str, stands_alone: bool | None) -> ImageLayout:
        # Not black: some processors warn of pictures that look as if they were scaled already.
        blank = Image.new("RGB", (width, height), (128, 128, 128))
        replacement, inputs = self._process(blank, processor_kwargs, stands_alone)
        (tokens,) = self._backend.encode_batch_fast([replacement], add_special_tokens=False)
        embedded = np.asarray(tokens.ids) == self.embed_token_id
        edges = np.flatnonzero(np.diff(embedded, prepend=False, append=False))
        if not len(edges):
            raise MediaError(f"this model sees nothing in a picture of {width}x{height} pixels")
        return ImageLayout(
            replacement=replacement,
            embed_runs=tuple((edges[1::2] - edges[::2]).tolist()),
            input_shapes={name: array.shape for name, array in inputs.items()},
            num_input_bytes=sum(array.nbytes for array in inputs.values()),
            layout={name: tuple(inputs[name].ravel().tolist()) for name in sorted(_LAYOUT_INPUTS & inputs.keys())},
            stands_alone=stands_alone,
        )

    def _process(
        self, image: Image.Image, processor_kwargs: str, stands_alone: bool | None
    ) -> tuple[str, dict[str, np.ndarray]]:
        """The text in the picture's place, and its inputs."""
        # Whether there is company matters, not which.
        pictures = [image, Image.new("RGB", (1, 1))] if stands_alone is False else [image]
        try:
            processed, replacements = self._real._process_images([pictures], **self._images_kwargs(processor_kwargs))
        except MemoryError:
            raise
        except Exception as error:  # whatever a processor raises for sizes or options it does not expect
            size = f"{image.width}x{image.height}"
            raise MediaError(f"this model cannot take a picture of {size} pixels: {error}") from error
        names = [name for name in processed if name in self._real.model_input_names]
        inputs = {name: np.ascontiguousarray(processed[name]) for name in names}
        if stands_alone is False:
            inputs = {name: array if name == _COMPANY_INPUT else array[:1] for name, array in inputs.items()}
        return replacements[0], inputs

    def _images_kwargs(self, processor_kwargs: str) -> dict[str, Any]:
        """Everything that the image processor is called with, as the processor itself would put it together."""
        chosen = self._server_kwargs | json.loads(processor_kwargs) | {"return_tensors": "np"}
        merged = self._real._merge_kwargs(tokenizer_init_kwargs=self._real.tokenizer.init_kwargs, images_kwargs=chosen)
        return merged["images_kwargs"]


def _fit(height: int, width: int, side: int) -> tuple[int, int]:
    """The size of a picture shrunk to fit a square of `side` pixels; its own where it does."""
    longest = max(height, width)
    if longest <= side:
        return height, width
    return max(1, round(height * side / longest)), max(1, round(width * side / longest))


def _fingerprint(real: ProcessorMixin, server_kwargs: Mapping[str, Any]) -> str:
    import PIL
    import transformers

    described = real.to_dict() | {"video_processor": None}
    versions = [transformers.__version__, PIL.__version__]
    parts = [type(real).__name__, type(real.image_processor).__name__, described, server_kwargs, versions]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
