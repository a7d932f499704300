"""Encoded image → RGB pixels, in one canonical form, under limits."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np

from .canonical_rgb import to_rgb
from .errors import MediaError
from .formats import ImageFormat, ImageHeader, identify
from .formats.header import broken

# As in a JPEG. What resizing takes grows with the side, not with the pixels: Pillow needs 32 to 48 bytes for each pixel
# of it and at some length runs out of memory, and a processor was seen to work for half a minute.
MAX_SIDE = 65_535


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What is decoded at most, besides that no side has more than `MAX_SIDE` pixels.

    Pixels: 64 Mi, so that a phone's 50 megapixels are decoded. Measured, decoding takes 4 to 12 bytes for each pixel at
    its height, 18 if it is WebP: up to 0.75 or 1.1 GiB for the largest image, of which 192 MiB are the result. Frames:
    1,000; only the first one is looked at, and of a longer file that would be too little to answer from.
    """

    max_pixels: int = 64 << 20
    max_frames: int = 1000

    def __post_init__(self) -> None:
        for name, value in (("max_pixels", self.max_pixels), ("max_frames", self.max_frames)):
            if value < 1:
                raise ValueError(f"{name} must be positive, not {value}")

    def check_size(self, height: int, width: int) -> None:
        """Raises MediaError: a picture of so many pixels is too large."""
        num_pixels = height * width
        if num_pixels > self.max_pixels:
            raise MediaError(
                f"the image is too large: {width} × {height} = {num_pixels} pixels, more than {self.max_pixels}"
            )
        if max(height, width) > MAX_SIDE:
            raise MediaError(f"the image is too large: {width} × {height} pixels, a side has more than {MAX_SIDE}")


def image_size(encoded: bytes, limits: ImageLimits) -> tuple[int, int]:
    """(height, width) that `decode_image` would give, from the header alone: nothing is decoded.

    Raises MediaError: not an image, broken so far as the header shows, beyond the limits.
    """
    return _read_header(encoded, limits)[1].size


def decode_image(encoded: bytes, limits: ImageLimits) -> np.ndarray:
    """The picture as `[height, width, 3]` uint8, C-contiguous, RGB.

    As a person would see it: turned as its EXIF orientation says (a broken EXIF block is ignored), on white where it is
    transparent, and of an animation or several pages the first one. Color profiles are not applied. What happens to
    each kind of pixels: `canonical_rgb.to_rgb`. Raises MediaError for whatever is wrong, never anything else; the
    limits are checked before anything is decoded.
    """
    image_format, header = _read_header(encoded, limits)
    return _turned(_decode(image_format, header, image_format.only_pixels(encoded)), header.orientation)


def _decode(image_format: ImageFormat, header: ImageHeader, pixels: bytes) -> np.ndarray:
    """`[height, width, 3]` as stored. What Pillow holds is free again when this returns."""
    try:
        with image_format.plugin(io.BytesIO(pixels)) as image:
            if (image.height, image.width) != (header.height, header.width):
                raise broken(image_format.name, "it has two sizes")
            image.load()
            return to_rgb(image)
    except MediaError:
        raise
    except Exception as error:  # Pillow promises nothing about what it raises for hostile bytes
        raise broken(image_format.name, str(error) or type(error).__name__) from error


def _read_header(encoded: bytes, limits: ImageLimits) -> tuple[ImageFormat, ImageHeader]:
    image_format = identify(encoded)
    header = image_format.read_header(encoded, limits.max_frames)
    limits.check_size(header.height, header.width)
    if header.num_frames > limits.max_frames:
        raise MediaError(f"the image has more than {limits.max_frames} frames")
    return image_format, header


def _turned(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """As EXIF means it: 6 was taken with the camera's right side up, and so on."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)
