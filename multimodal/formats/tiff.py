"""TIFF. The first page counts."""

from __future__ import annotations

import math
from collections.abc import Iterable

from PIL import TiffTags

from multimodal.errors import MediaError

from . import directory
from .directory import Directory, Entry, Layout
from .header import ImageHeader, broken

SIGNATURES = (b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+")
WIDTH, HEIGHT, COMPRESSION = 256, 257, 259
STRIPS, SAMPLES, STRIP_HEIGHT, PLANES = 273, 277, 278, 284
TILE_WIDTH, TILE_HEIGHT, TILES = 322, 323, 324
COMPRESSIONS = {1, 5, 8, 32773, 32946}
"""None, LZW, Deflate (two numbers for it), PackBits. If a file is broken in one of the others, CCITT and JPEG, libtiff
may tell standard error of every row of it: so much that it fills a disk. Of these it tells once for a part at most."""
MAX_SAMPLES = 6
PIXEL_TAGS = {
    *(WIDTH, HEIGHT, COMPRESSION, STRIPS, SAMPLES, STRIP_HEIGHT, PLANES, TILE_WIDTH, TILE_HEIGHT, TILES),
    *(258, 262, 266, 279, 317, 320, 325, 332, 338, 339),  # bits, colors, sizes of strips and tiles, predictor, palette
    *(529, 530, 531, 532),  # what YCbCr means
}
MAX_PARTS = 1 << 14
"""Strips or tiles; Pillow needs some hundred bytes for each."""
MAX_VALUES = 1 << 18
"""Of another field. A palette has up to 3 × 65536."""
SEPARATE = 2
"""Planes: every sample has strips or tiles of its own."""
MAX_SMALL_TILE_PIXELS = 1 << 20


def starts(data: bytes) -> bool:
    return data.startswith(SIGNATURES)


def read_header(data: bytes, max_frames: int) -> ImageHeader:
    layout, offset = directory.read_start(data)
    first = directory.read_directory(data, layout, offset)
    orientation = directory.valid_orientation(first.number(directory.ORIENTATION))
    num_frames = directory.count_directories(data, layout, offset, max_frames)
    width, height = first.number(WIDTH), first.number(HEIGHT)
    if width is None or height is None:
        raise broken("TIFF", "it does not say its size")
    return ImageHeader(height, width, orientation, num_frames)


def only_pixels(data: bytes) -> bytes:
    """The same first page, with a directory of nothing but what its pixels need.

    So Pillow sees no other page, no directory below, no metadata, and no orientation (it would apply that itself). The
    new directory is written over the old one, which is no shorter: what was cut off at the end stays missing.
    """
    layout, offset = directory.read_start(data)
    first = directory.read_directory(data, layout, offset)
    kept = {entry.tag: entry for entry in reversed(first.entries) if entry.tag in PIXEL_TAGS}
    _check(first, kept, len(data))
    fields = [layout.entry_field.pack(*kept[tag]) for tag in sorted(kept)]
    written = layout.count_field.pack(len(fields)) + b"".join(fields) + layout.offset_field.pack(0)
    return data[:offset] + written + data[offset + len(written) :]


def _check(first: Directory, kept: dict[int, Entry], num_file_bytes: int) -> None:
    compression = first.number(COMPRESSION)
    if compression not in COMPRESSIONS | {None}:
        raise MediaError(f"TIFF images with compression {compression} are not read")
    _check_fields(first.layout, kept.values(), num_file_bytes)
    width, height = first.number(WIDTH) or 0, first.number(HEIGHT) or 0
    tile_width, tile_height = first.number(TILE_WIDTH) or width, first.number(TILE_HEIGHT) or height
    if TILES in kept and tile_width * tile_height > max(MAX_SMALL_TILE_PIXELS, width * height):
        raise broken("TIFF", "a tile is larger than the picture")
    num_samples = first.number(SAMPLES) or 1
    if num_samples > MAX_SAMPLES:
        raise broken("TIFF", f"it has {num_samples} samples for a pixel, more than {MAX_SAMPLES}")
    num_planes = num_samples if first.number(PLANES) == SEPARATE else 1
    num_strips = math.ceil(height / (first.number(STRIP_HEIGHT) or height))
    num_tiles = math.ceil(width / tile_width) * math.ceil(height / tile_height)
    for tag, num_expected in ((STRIPS, num_strips), (TILES, num_tiles)):
        # Each costs the decoder up to a whole picture, and all of them may be the same bytes of the file.
        if tag in kept and kept[tag].num_values > num_expected * num_planes:
            raise broken("TIFF", f"it has {kept[tag].num_values} parts where {num_expected * num_planes} are enough")


def _check_fields(layout: Layout, entries: Iterable[Entry], num_file_bytes: int) -> None:
    """So that Pillow reads the numbers that are checked here, and has nothing to warn of, however often it is asked."""
    num_bytes_elsewhere = 0
    for entry in entries:
        max_values = MAX_PARTS if entry.tag in (STRIPS, TILES) else MAX_VALUES
        if entry.num_values > max_values:
            raise broken("TIFF", f"field {entry.tag} has {entry.num_values} values, more than {max_values}")
        is_number = entry.num_values == 1 and entry.kind in directory.NUMBER_BYTES
        if TiffTags.lookup(entry.tag).length == 1 and not is_number:
            raise broken("TIFF", f"field {entry.tag} is not one number")
        num_bytes = entry.num_values * directory.VALUE_BYTES.get(entry.kind, 0)
        if num_bytes > len(entry.value):
            num_bytes_elsewhere += num_bytes
            if layout.offset_field.unpack(entry.value)[0] + num_bytes > num_file_bytes:
                raise broken("TIFF", f"field {entry.tag} lies beyond the end")
    if num_bytes_elsewhere > num_file_bytes:
        raise broken("TIFF", "its fields are larger than the file")
