"""One picture through the image side of a transformers processor: the text in its place, and its inputs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from .errors import MediaError

if TYPE_CHECKING:
    from transformers import ProcessorMixin

# How many pictures each conversation has: an input of models that see a picture otherwise in company.
_COMPANY_INPUT = "batch_num_images"
# None of these changes a shape, and most of a processor's time goes there. Whether it holds for a processor is tried.
_QUICKLY = {"do_normalize": False, "do_rescale": False, "resample": Image.Resampling.NEAREST}
_PROBE_SIZE = (48, 64)
# Some processors blow a long, narrow picture up before they cut it down: to so many pixels at most (400 MB).
_MAX_INTERMEDIATE_PIXELS = 2**27


@dataclass(frozen=True, slots=True)
class Made:
    """What a processor made of a picture: the text in its place, and its inputs, or only their shapes."""

    replacement: str
    inputs: dict[str, np.ndarray]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: array.shape for name, array in self.inputs.items()}


class RealProcessor:
    """Calls a transformers processor, for pictures one at a time, from any thread.

    Attributes:
        accepted: the TypedDict of what its image processor can be called with.
        own_values: what that is called with unless a request says otherwise, by name.
        company_matters: whether it makes something else of a picture that is not the only one of its prompt.
        item_bytes: what a number of each input weighs.
    """

    def __init__(self, processor: ProcessorMixin, server_kwargs: Mapping[str, Any]) -> None:
        self._processor = processor
        self._server_kwargs = dict(server_kwargs)
        self._pads_to_square = hasattr(processor.image_processor, "pad_to_square")
        self.accepted: type = processor.image_processor.valid_kwargs
        self.company_matters = _COMPANY_INPUT in processor.image_processor.model_input_names
        self.own_values: dict[str, Any] = processor.image_processor.to_dict() | self._call_kwargs({})

        blank = Image.new("RGB", (_PROBE_SIZE[1], _PROBE_SIZE[0]))
        made = self.make(blank, {}, stands_alone=True)
        self.item_bytes = {name: array.itemsize for name, array in made.inputs.items()}
        self._blank_kwargs = {name: value for name, value in _QUICKLY.items() if name in self.accepted.__annotations__}
        if not self._makes_of_a_blank(made):
            self._blank_kwargs = {}

    @property
    def fingerprint(self) -> str:
        """Equal where equal pictures and options give equal inputs."""
        import PIL
        import transformers

        names = [type(self._processor).__name__, type(self._processor.image_processor).__name__]
        described = self._processor.to_dict() | {"video_processor": None}
        parts = [names, described, self._server_kwargs, transformers.__version__, PIL.__version__]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    def make(self, image: Image.Image, kwargs: Mapping[str, Any], *, stands_alone: bool | None) -> Made:
        """Process a picture; `stands_alone=False` as one of several.

        Raises:
            MediaError: the processor does not take it, or would need memory out of all proportion.
        """
        size = f"{image.width}x{image.height} pixels"
        call_kwargs = self._call_kwargs(kwargs)
        if self._intermediate_pixels(image, call_kwargs, stands_alone) > _MAX_INTERMEDIATE_PIXELS:
            raise MediaError(f"a picture of {size} is too long and narrow for this model")
        # Whether there is company matters, not which.
        pictures = [image, Image.new("RGB", (1, 1))] if stands_alone is False else [image]
        try:
            processed, replacements = self._processor._process_images([pictures], **call_kwargs)
        except MemoryError:
            raise
        except Exception as error:  # whatever a processor raises for sizes or options it does not expect
            raise MediaError(f"this model cannot take a picture of {size}: {error}") from error
        names = [name for name in processed if name in self._processor.model_input_names]
        inputs = {name: np.ascontiguousarray(processed[name]) for name in names}
        if stands_alone is False:
            inputs = {name: array if name == _COMPANY_INPUT else array[:1] for name, array in inputs.items()}
        return Made(replacements[0], inputs)

    def make_of_blank(self, height: int, width: int, kwargs: Mapping[str, Any], *, stands_alone: bool | None) -> Made:
        """As `make`, of a picture without content; only text, shapes and what is no pixel count, and it costs less."""
        # Not black: some processors warn of pictures that look as if they were scaled already.
        blank = Image.new("RGB", (width, height), (128, 128, 128))
        return self.make(blank, {**kwargs, **self._blank_kwargs}, stands_alone=stands_alone)

    def _makes_of_a_blank(self, made: Made) -> bool:
        try:
            quick = self.make_of_blank(*_PROBE_SIZE, {}, stands_alone=True)
        except MediaError:
            return False
        return (quick.replacement, quick.shapes) == (made.replacement, made.shapes)

    def _call_kwargs(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Everything that the image processor is called with, as the processor itself would put it together."""
        chosen = {**self._server_kwargs, **kwargs, "return_tensors": "np"}
        init_kwargs = self._processor.tokenizer.init_kwargs
        return self._processor._merge_kwargs(tokenizer_init_kwargs=init_kwargs, images_kwargs=chosen)["images_kwargs"]

    def _intermediate_pixels(
        self, image: Image.Image, call_kwargs: Mapping[str, Any], stands_alone: bool | None
    ) -> int:
        """How many pixels the picture may have while it is brought to the size that the model wants."""
        longest, shortest = max(image.size), min(image.size)
        if self._pads_to_square:
            # Those that know company pad in company, others where they are told to.
            own_choice = call_kwargs.get("do_pad", self.own_values.get("do_pad"))
            if stands_alone is False or (own_choice and not self.company_matters):
                return longest * longest
        size = call_kwargs.get("size", self.own_values.get("size"))
        edge = size if isinstance(size, int) else 0
        if isinstance(size, Mapping) and "longest_edge" not in size:
            edge = size.get("shortest_edge", 0)
        return edge * edge * longest // shortest
