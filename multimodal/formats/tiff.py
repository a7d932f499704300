"""TIFF. The first page counts."""

from __future__ import annotations

from multimodal.errors import MediaError
from multimodal.formats import directory
from multimodal.formats.directory import Directory, Entry
from multimodal.formats.header import ImageHeader, broken

SIGNATURES = (b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+")
WIDTH, HEIGHT, COMPRESSION = 256, 257, 259
TILE_WIDTH, TILE_HEIGHT = 322, 323
COMPRESSIONS = {1, 2, 3, 4, 5, 7, 8, 32773, 32946}
"""None, CCITT (three of them), LZW, JPEG, Deflate (two numbers for it), PackBits."""
PIXEL_TAGS = {
    *(WIDTH, HEIGHT, COMPRESSION, TILE_WIDTH, TILE_HEIGHT),
    *(258, 262, 266, 277, 284, 317, 320, 332, 338, 339),  # bits, colors, samples, planes, predictor, palette
    *(273, 278, 279, 324, 325),  # strips and tiles: where, how many rows, how many bytes
    *(292, 293, 347, 529, 530, 531, 532),  # CCITT's options, JPEG's tables, YCbCr
}
MAX_VALUES = 1 << 18
"""Of one field. So many tiles of 16 × 16 make 67 million pixels; Pillow needs some hundred bytes for each."""
MAX_SMALL_TILE_PIXELS = 1 << 20


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
    fields = [layout.entry.pack(*kept[tag]) for tag in sorted(kept)]
    ending = layout.count.pack(len(fields)) + b"".join(fields) + layout.offset.pack(0)
    start = data[: layout.header_bytes - layout.offset.size] + layout.offset.pack(len(data))
    return start + data[layout.header_bytes :] + ending


def _first_directory(data: bytes) -> Directory:
    return directory.read_directory(data, *directory.read_start(data))


def _check(first: Directory, kept: dict[int, Entry]) -> None:
    compression = first.number(COMPRESSION)
    if compression not in COMPRESSIONS | {None}:
        raise MediaError(f"TIFF images with compression {compression} are not read")
    if too_many := [entry.tag for entry in kept.values() if entry.count > MAX_VALUES]:
        raise broken("TIFF", f"field {too_many[0]} has more than {MAX_VALUES} values")
    tile_pixels = (first.number(TILE_WIDTH) or 0) * (first.number(TILE_HEIGHT) or 0)
    if tile_pixels > max(MAX_SMALL_TILE_PIXELS, (first.number(WIDTH) or 0) * (first.number(HEIGHT) or 0)):
        raise broken("TIFF", "a tile is larger than the picture")
