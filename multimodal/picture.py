"""A picture on its way into a prompt, as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .errors import MediaError

if TYPE_CHECKING:
    from .layout import ImageLayout
    from .options import ImageOptions

# A picture file, or a data: URL with one in it, as it came: what is known already is not worth reading base64 for.
EncodedPicture = bytes | str
# That, or decoded pixels: uint8 [height, width, 3].
PictureContent = EncodedPicture | np.ndarray


class PictureError(MediaError):
    """A picture of a prompt cannot be used. `where` is its `PictureSource.where`; the message does not repeat it."""

    def __init__(self, message: str, where: str) -> None:
        super().__init__(message)
        self.where = where


@contextmanager
def errors_at(where: str) -> Iterator[None]:
    """MediaErrors become PictureErrors of the picture at `where`."""
    try:
        yield
    except PictureError:
        raise
    except MediaError as error:
        raise PictureError(str(error), where) from error


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PictureSource:
    """Where a picture of a prompt comes from: a `url`, `data` at hand, or what was sent before under this `uuid`.

    `data` is a picture file, or decoded pixels: uint8 `[height, width, 3]`; those are copied. `where` names the picture
    in errors (`messages[0].content[1]`). A `uuid` beside a url or data names the content for later.
    """

    where: str
    options: ImageOptions
    url: str | None = None
    data: bytes | np.ndarray | None = None
    uuid: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Picture:
    """A picture whose place in the prompt is known, and of which model inputs can be made.

    `content_hash` is equal where the model sees the same, `key` where besides the tenant is the same (`feature_key`).
    `content` is what inputs are made of, should the engine want them.
    """

    where: str
    content_hash: bytes
    key: bytes
    height: int
    width: int
    layout: ImageLayout
    options: ImageOptions
    content: PictureContent = field(repr=False)
    pixels_key: bytes = field(repr=False)
