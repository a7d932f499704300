"""TIFF. The first page counts."""

from __future__ import annotations

import math

from multimodal.errors import MediaError
from multimodal.formats import directory
from multimodal.formats.directory import Directory, Entry
from multimodal.formats.header import ImageHeader, broken

SIGNATURES = (b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+")
WIDTH, HEIGHT, COMPRESSION = 256, 257, 259
STRIPS, SAMPLES, STRIP_HEIGHT, PLANES = 273, 277, 278, 284
TILE_WIDTH, TILE_HEIGHT, TILES = 322, 323, 324
COMPRESSIONS = {1, 2, 3, 4, 5, 7, 8, 32773, 32946}
"""None, CCITT (three of them), LZW, JPEG, Deflate (two numbers for it), PackBits."""
PIXEL_TAGS = {
    *(WIDTH, HEIGHT, COMPRESSION, STRIPS, SAMPLES, STRIP_HEIGHT, PLANES, TILE_WIDTH, TILE_HEIGHT, TILES),
    *(258, 262, 266, 279, 317, 320, 325, 332, 338, 339),  # bits, colors, sizes of strips and tiles, predictor, palette
    *(292, 293, 347, 529, 530, 531, 532),  # CCITT's options, JPEG's tables, YCbCr
}
MAX_VALUES = 1 << 18
"""Of one field. So many tiles of 16 × 16 make 67 million pixels; Pillow needs some hundred bytes for each."""
SEPARATE = 2
"""Planes: every sample has strips or tiles of its own."""
MAX_SMALL_TILE_PIXELS = 1 << 20


def starts(data: bytes) -> bool:
    return data.startswith(SIGNATURES)


def read_header(data: bytes, max_frames: int) -> ImageHeader:
    first = _first_directory(data)
    layout, offset = directory.read_start(data)
    orientation = directory.valid_orientation(first.number(directory.ORIENTATION))
    num_frames = directory.count_directories(data, layout, offset, max_frames)
    width, height = first.number(WIDTH), first.number(HEIGHT)
    if width is None or height is None:
        raise broken("TIFF", "it does not say its size")
    return ImageHeader(height, width, orientation, num_frames)


def only_pixels(data: bytes) -> bytes:
    """The same first page, with a directory of nothing but what its pixels need.

    So Pillow sees no other page, no directory below, no metadata, and no orientation (it would apply that itself).
    """
    layout, entries, _ = first = _first_directory(data)
    kept = {entry.tag: entry for entry in reversed(entries) if entry.tag in PIXEL_TAGS}
    _check(first, kept)
    data += b"\x00" * (len(data) % 2)
    fields = [layout.entry_field.pack(*kept[tag]) for tag in sorted(kept)]
    ending = layout.count_field.pack(len(fields)) + b"".join(fields) + layout.offset_field.pack(0)
    start = data[: layout.header_bytes - layout.offset_field.size] + layout.offset_field.pack(len(data))
    return start + data[layout.header_bytes :] + ending


def _first_directory(data: bytes) -> Directory:
    return directory.read_directory(data, *directory.read_start(data))


def _check(first: Directory, kept: dict[int, Entry]) -> None:
    compression = first.number(COMPRESSION)
    if compression not in COMPRESSIONS | {None}:
        raise MediaError(f"TIFF images with compression {compression} are not read")
    if too_many := [entry.tag for entry in kept.values() if entry.num_values > MAX_VALUES]:
        raise broken("TIFF", f"field {too_many[0]} has more than {MAX_VALUES} values")
    width, height = first.number(WIDTH) or 0, first.number(HEIGHT) or 0
    tile_width, tile_height = first.number(TILE_WIDTH) or width, first.number(TILE_HEIGHT) or height
    if TILES in kept and tile_width * tile_height > max(MAX_SMALL_TILE_PIXELS, width * height):
        raise broken("TIFF", "a tile is larger than the picture")
    num_planes = (first.number(SAMPLES) or 1) if first.number(PLANES) == SEPARATE else 1
    num_strips = math.ceil(height / (first.number(STRIP_HEIGHT) or height))
    num_tiles = math.ceil(width / tile_width) * math.ceil(height / tile_height)
    for tag, num_expected in ((STRIPS, num_strips), (TILES, num_tiles)):
        # Each costs the decoder up to a whole picture, and all of them may be the same bytes of the file.
        if tag in kept and kept[tag].num_values > num_expected * num_planes:
            raise broken("TIFF", f"it has {kept[tag].num_values} parts where {num_expected * num_planes} are enough")
