"""What a request may choose of how its picture is processed: checked, bounded, and in one spelling."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from .errors import MediaError

ImageDetail = Literal["auto", "high", "low"]

# With `detail="low"` a picture is shrunk to fit a square of this side before the model's processor sees it.
LOW_DETAIL_SIDE = 512

# The format of what goes in and comes out is ours; its scale, its patches and tiles are the model's: its weights or its
# configuration depend on them, and a picture made otherwise could not be told how many tokens it fills. Nor may anybody
# choose how large a tile is, or that nothing is made smaller: a picture in tiles of a pixel each fills the machine.
_FIXED_NAMES = frozenset(
    {
        *("data_format", "device", "disable_grouping", "do_convert_rgb", "input_data_format", "return_tensors"),
        *("default_to_square", "do_normalize", "do_rescale", "image_mean", "image_std", "pad_size", "resample"),
        *("image_grid_pinpoints", "image_seq_length", "merge_size", "patch_size", "temporal_patch_size"),
        *("crop_size", "do_center_crop", "do_resize", "max_image_size", "rescale_factor", "return_row_col_info"),
    }
)
# Which sizes a picture may be cut to in tiles; those have the size that is called `size` then.
_TILED = "image_grid_pinpoints"


class OptionError(MediaError):
    """An option of a picture that the model's processor does not take, or not so.

    Attributes:
        name: the processor's argument that it is about; None where it is the arguments as a whole, or `detail`.
    """

    def __init__(self, message: str, name: str | None = None) -> None:
        super().__init__(message)
        self.name = name


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """How a picture is to be processed. Made by `PictureProcessor.options`; plain `ImageOptions()` fits every model.

    `auto` and `high` show the picture as it is. `low` shrinks one that does not fit 512×512 pixels until it does, its
    aspect ratio kept, in every family alike. `processor_kwargs` is a JSON object, sorted by names and without blanks.
    """

    detail: ImageDetail = "auto"
    processor_kwargs: str = "{}"

    @property
    def shrinks(self) -> bool:
        """Whether a large picture is made smaller first."""
        return self.detail == "low"

    @property
    def canonical(self) -> dict[str, Any]:
        """Equal only where a picture is processed alike, whatever its size; of JSON's types."""
        return {"shrinks": self.shrinks, "processor_kwargs": json.loads(self.processor_kwargs)}


def check_detail(detail: object) -> ImageDetail:
    """Return `detail`.

    Raises:
        OptionError: it is none.
    """
    known: tuple[ImageDetail, ...] = get_args(ImageDetail)
    for name in known:
        if detail == name:
            return name
    raise OptionError(f"detail must be one of {', '.join(known)}, not {detail!r}")


def check_processor_kwargs(
    kwargs: Mapping[str, Any], accepted: type, own: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return `kwargs` sorted by name, if an image processor that accepts those of the TypedDict `accepted` takes them.

    With the model's `own` values, no number may be larger than the largest that the model has itself for that name:
    it may be shown less of a picture, or in fewer tiles, but nobody can make a small picture fill the machine. A least
    size may be as large as any that the model has. What the model has by names (`size`) has the same names.

    Raises:
        OptionError: another name, type or size.
    """
    from huggingface_hub.dataclasses import validate_typed_dict
    from huggingface_hub.errors import StrictDataclassError

    fixed = _FIXED_NAMES | {"size"} if _TILED in accepted.__annotations__ else _FIXED_NAMES
    allowed = sorted(accepted.__annotations__.keys() - fixed)
    for name, value in kwargs.items():
        if name not in allowed:
            raise OptionError(f"this model's image processor takes no {name!r} here, but {', '.join(allowed)}", name)
        if value is None:
            raise OptionError(f"{name} must have a value", name)
        try:
            validate_typed_dict(accepted, {name: value})
        except (StrictDataclassError, TypeError, ValueError) as error:
            reason = " ".join(str(error.__cause__ or error).split())
            raise OptionError(f"{name}: {reason}", name) from error
        if own is not None:
            _check_names(name, value, own.get(name))
            _check_numbers(name, value, own)
    return {name: kwargs[name] for name in sorted(kwargs)}


def canonical_json(value: object) -> str:
    """The one spelling of a value of JSON's types.

    Raises:
        ValueError: a number that is not finite.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _check_names(name: str, value: Any, own: Any) -> None:
    # A length of another side than the model's would say nothing about the other one.
    if isinstance(own, Mapping) and (not isinstance(value, Mapping) or value.keys() != own.keys()):
        raise OptionError(f"{name}: this model has it as {', '.join(own)}", name)


def _check_numbers(name: str, value: Any, own: Mapping[str, Any]) -> None:
    own_numbers = list(_numbers(own.get(name)))
    if not own_numbers or "min" in name.split("_"):
        own_numbers += _numbers(own.get("size"))
    most = max(own_numbers, default=0)
    for number in _numbers(value):
        if not 0 < number < float("inf"):
            raise OptionError(f"{name}: {number} is not a positive number", name)
        if isinstance(number, int) and number > most:
            raise OptionError(f"{name}: {number} is more than the {most} that this model has itself", name)


def _numbers(value: Any) -> Iterator[int | float]:
    """All numbers in a value, as deep as they are."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from _numbers(part)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value
