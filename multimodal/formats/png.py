"""PNG, animated or not. The default image is what counts: it is what a viewer that knows no animation shows."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from . import directory
from .header import ImageHeader, broken

SIGNATURE = b"\x89PNG\r\n\x1a\n"
MAX_CHUNKS = 1 << 17
"""Far more than encoders write, and few enough to walk in tens of milliseconds."""
GREY, RGB, PALETTE = 0, 2, 3


class Chunk(NamedTuple):
    kind: bytes
    start: int
    end: int


def starts(data: bytes) -> bool:
    return data.startswith(SIGNATURE)


def read_header(data: bytes, max_frames: int) -> ImageHeader:
    width, height, *_ = _image_header(data)
    orientation = num_frames = 1
    for kind, start, end in _chunks(data):
        if kind == b"eXIf":
            orientation = directory.orientation(data[start:end])
        elif kind == b"acTL" and end - start >= 4:
            num_frames = struct.unpack_from(">I", data, start)[0]
    return ImageHeader(height, width, orientation, num_frames)


def only_pixels(data: bytes) -> bytes:
    """The same picture with nothing but its pixels: no text, no profile, no animation, one chunk of data."""
    _, _, depth, color_type = _image_header(data)
    kept: dict[bytes, bytes] = {}
    pixels = []
    for kind, start, end in _chunks(data):
        if kind in (b"IHDR", b"PLTE", b"tRNS", b"IDAT"):
            body = data[start:end]
            if zlib.crc32(body, zlib.crc32(kind)) != struct.unpack_from(">I", data, end)[0]:
                raise broken("PNG", f"the checksum of its {kind.decode()} is wrong")
            if kind == b"IDAT":
                pixels.append(body)
            else:
                kept.setdefault(kind, body)
    if color_type == PALETTE and not kept.get(b"PLTE"):
        raise broken("PNG", "it has no palette")
    if not pixels:
        raise broken("PNG", "it has no pixels")
    if b"tRNS" in kept and color_type in (GREY, RGB):
        kept[b"tRNS"] = _transparent_color(kept[b"tRNS"], color_type, depth)
    kept[b"IDAT"] = b"".join(pixels)
    kept[b"IEND"] = b""
    order = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")
    return SIGNATURE + b"".join(_chunk(kind, kept[kind]) for kind in order if kind in kept)


def _image_header(data: bytes) -> tuple[int, int, int, int]:
    """(width, height, bit depth, color type)."""
    length, kind, width, height, depth, color_type = struct.unpack_from(">I4sIIBB", data, len(SIGNATURE))
    if kind != b"IHDR" or length != 13:
        raise broken("PNG", "it does not start with its header")
    return width, height, depth, color_type


def _chunks(data: bytes) -> Iterator[Chunk]:
    """Ends with the IEND chunk. A file without one was cut off."""
    position = len(SIGNATURE)
    for _ in range(MAX_CHUNKS):
        if position + 12 > len(data):
            break
        length, kind = struct.unpack_from(">I4s", data, position)
        chunk = Chunk(kind, position + 8, position + 8 + length)
        if chunk.end + 4 > len(data):
            break
        if kind == b"IEND":
            return
        yield chunk
        position = chunk.end + 4
    else:
        raise broken("PNG", f"more than {MAX_CHUNKS} chunks")
    raise broken("PNG", "it is cut off")


def _transparent_color(body: bytes, color_type: int, depth: int) -> bytes:
    """In the depth in which Pillow holds the pixels: grey of 2 and 4 bits becomes 8, RGB of 16 becomes 8."""
    count = 1 if color_type == GREY else 3
    if len(body) < 2 * count:
        raise broken("PNG", "its transparent color is cut off")
    values = [value & ((1 << depth) - 1) for value in struct.unpack_from(f">{count}H", body)]
    if color_type == GREY and depth in (2, 4):
        values = [value * 255 // ((1 << depth) - 1) for value in values]
    if color_type == RGB and depth == 16:
        values = [value >> 8 for value in values]
    return struct.pack(f">{count}H", *values)


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(body, zlib.crc32(kind)))
