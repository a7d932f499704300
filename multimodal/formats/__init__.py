"""The image formats that are read, a room for each: what a file says of itself, and the same picture without the rest.

A decoder gets pixels only. Text, profiles, thumbnails, further pages and directories are where files lie about sizes,
and nothing of them is shown to a model.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from multimodal.errors import MediaError

from . import bmp, gif, jpeg, png, tiff, webp
from .header import ImageHeader, broken

__all__ = ["FORMATS", "ImageFormat", "ImageHeader", "identify"]


@dataclass(frozen=True, slots=True)
class ImageFormat:
    """One format. `plugin` is Pillow's class for it, used directly: `Image.open` would try, and load, all of them."""

    name: str
    starts: Callable[[bytes], bool]
    parse_header: Callable[[bytes, int], ImageHeader]
    strip: Callable[[bytes], bytes]
    plugin: Callable[[io.BytesIO], ImageFile]

    def read_header(self, encoded: bytes, max_frames: int) -> ImageHeader:
        """Raises MediaError. Takes time for at most `max_frames` + 1 frames, and no memory to speak of."""
        with self._structure_errors():
            header = self.parse_header(encoded, max_frames)
        if header.height == 0 or header.width == 0:
            raise broken(self.name, f"it is {header.width} × {header.height} pixels large")
        return header

    def only_pixels(self, encoded: bytes) -> bytes:
        """The same picture without what is not its pixels, for `plugin`. Raises MediaError."""
        with self._structure_errors():
            return self.strip(encoded)

    @contextmanager
    def _structure_errors(self) -> Iterator[None]:
        try:
            yield
        except MediaError:
            raise
        except (ValueError, struct.error) as error:
            raise broken(self.name, "it is cut off or senseless") from error


FORMATS = (
    ImageFormat("PNG", png.starts, png.read_header, png.only_pixels, PngImageFile),
    ImageFormat("JPEG", jpeg.starts, jpeg.read_header, jpeg.only_pixels, JpegImageFile),
    ImageFormat("WebP", webp.starts, webp.read_header, webp.only_pixels, WebPImageFile),
    ImageFormat("GIF", gif.starts, gif.read_header, gif.only_pixels, GifImageFile),
    ImageFormat("BMP", bmp.starts, bmp.read_header, bmp.only_pixels, BmpImageFile),
    ImageFormat("TIFF", tiff.starts, tiff.read_header, tiff.only_pixels, TiffImageFile),
)


def identify(encoded: bytes) -> ImageFormat:
    """By its first bytes, never by what somebody says it is. Raises MediaError if it is none of `FORMATS`."""
    for image_format in FORMATS:
        if image_format.starts(encoded):
            return image_format
    if not encoded:
        raise MediaError("the image is empty (0 bytes)")
    names = ", ".join(image_format.name for image_format in FORMATS)
    seen = "; it looks like HTML, XML or SVG" if encoded[:256].lstrip().startswith(b"<") else ""
    raise MediaError(f"not an image in a format that is read ({names}){seen}")
