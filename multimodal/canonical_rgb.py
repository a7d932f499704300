"""Pixels of any of Pillow's modes → RGB.

A block of the picture after the other: what is needed beside source and result stays small, however large the picture.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from PIL.Image import Image

from .errors import MediaError

BLOCK_PIXELS = 1 << 18
TRANSPARENT_MODES = {"RGBA", "RGBa", "LA", "La", "PA"}
CONVERTED_MODES = {"RGBX", "CMYK", "YCbCr", "LAB", "HSV"}
SIXTEEN_BIT_MODES = {"I;16", "I;16L", "I;16B", "I;16N"}
RANGES = {"I": (65535.0,), "F": (1.0, 255.0, 65535.0)}

Key = int | tuple[int, ...] | None
Box = tuple[int, int, int, int]


def to_rgb(image: Image) -> np.ndarray:
    """`[height, width, 3]` uint8, C-contiguous.

    - 1, L: grey. LA, La, PA, RGBA, RGBa, and a transparent color or palette entry: composited on white, rounded.
    - P: through its palette. RGBX, CMYK, YCbCr, LAB, HSV: as Pillow converts them (CMYK without a profile; JPEGs of
      four components are inverted ones, as Adobe writes them).
    - I;16 in every byte order: 0 to 65535 becomes 0 to 255, rounded. (Color of 16 bits Pillow reads as its upper byte.)
    - I and F do not say what is white. The first range that holds all values is scaled: for I 0 to 65535; for F 0 to 1,
      0 to 255, 0 to 65535; if there is none, the picture's own smallest to largest value. Nothing is clipped; NaN is
      black, infinities are the ends.
    """
    key = _transparent_color(image)
    scale = _scale(image) if image.mode in RANGES else (0.0, 1.0)
    rgb = np.empty((image.height, image.width, 3), np.uint8)
    for left, top, right, bottom in _blocks(image):
        block = image.crop((left, top, right, bottom))
        rgb[top:bottom, left:right] = _block_to_rgb(block, key, scale)
    return rgb


def _block_to_rgb(block: Image, key: Key, scale: tuple[float, float]) -> np.ndarray:
    """`[height, width, 3]`, or `[height, width, 1]` of grey."""
    mode = block.mode
    if mode in TRANSPARENT_MODES or (mode == "P" and block.has_transparency_data):
        if mode == "La":
            block = block.convert("LA")  # from there Pillow knows a way to RGBA
        return _on_white(np.asarray(block.convert("RGBA")))
    if mode in CONVERTED_MODES or mode == "P":
        return np.asarray(block.convert("RGB"))
    if mode == "RGB":
        pixels = np.asarray(block)
        return _keyed(pixels, pixels, key)
    if mode in {"1", "L"}:
        grey = np.asarray(block.convert("L"))[:, :, None]
        return _keyed(grey, grey, key)
    if mode in SIXTEEN_BIT_MODES:
        values = np.asarray(block)[:, :, None].astype(np.uint32)
        return _keyed(((values + 128) // 257).astype(np.uint8), values, key)
    if mode in RANGES:
        low, span = scale
        values = np.nan_to_num((_as_floats(block)[:, :, None] - low) / span, nan=0.0)
        return np.rint(np.clip(values, 0.0, 1.0) * 255.0).astype(np.uint8)
    raise MediaError(f"images whose pixels are {mode!r} are not read")


def _on_white(rgba: np.ndarray) -> np.ndarray:
    """Rounded to nearest: (color × alpha + 255 × (255 − alpha)) / 255."""
    color, alpha = rgba[:, :, :3].astype(np.uint16), rgba[:, :, 3:].astype(np.uint16)
    return ((color * alpha + 255 * (255 - alpha) + np.uint16(127)) // 255).astype(np.uint8)


def _keyed(pixels: np.ndarray, values: np.ndarray, key: Key) -> np.ndarray:
    """`pixels`, white where all of `values` are the transparent color."""
    if key is None:
        return pixels
    is_transparent = (values == np.atleast_1d(key)).all(axis=2, keepdims=True)
    return np.where(is_transparent, np.uint8(255), pixels)


def _transparent_color(image: Image) -> Key:
    """None for palettes, too: there Pillow knows what is transparent."""
    key = image.info.get("transparency")
    num_bands = {"1": 1, "L": 1, "RGB": 3}.get(image.mode, 1 if image.mode in SIXTEEN_BIT_MODES else 0)
    return key if isinstance(key, int | tuple) and np.size(key) == num_bands else None


def _scale(image: Image) -> tuple[float, float]:
    """(what becomes black, how far above it is white)."""
    low, high = np.inf, -np.inf
    for box in _blocks(image):
        values = _as_floats(image.crop(box))
        if (finite := values[np.isfinite(values)]).size:
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
    for white in RANGES[image.mode]:
        if low >= 0.0 and high <= white:
            return 0.0, white
    return (low, high - low) if high > low else (0.0, 1.0)


def _as_floats(block: Image) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # NaNs that signal
        return np.asarray(block).astype(np.float64)


def _blocks(image: Image) -> Iterator[Box]:
    """(left, top, right, bottom) of blocks of about `BLOCK_PIXELS`, which together are the picture."""
    columns = min(image.width, BLOCK_PIXELS)
    rows = max(1, BLOCK_PIXELS // columns)
    for top in range(0, image.height, rows):
        for left in range(0, image.width, columns):
            yield left, top, min(left + columns, image.width), min(top + rows, image.height)
