"""WebP. Of an animation the first frame counts."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from . import directory
from .header import ImageHeader, broken

MAX_CHUNKS = 1 << 17


def starts(data: bytes) -> bool:
    return data[:4] == b"RIFF" and data[8:12] == b"WEBP"


def read_header(data: bytes, max_frames: int) -> ImageHeader:
    size = None
    orientation = 1
    num_frames = 0
    for kind, start, end in _chunks(data):
        if size is None:
            size = _size(kind, data[start : start + 10])
        if kind == b"EXIF":
            orientation = directory.orientation(data[start:end])
        elif kind == b"ANMF":
            num_frames += 1
            if num_frames > max_frames:
                break
    if size is None:
        raise broken("WebP", "it does not say its size")
    return ImageHeader(*size, orientation, max(1, num_frames))


def only_pixels(data: bytes) -> bytes:
    return data


def _chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """(kind, start, end) of each, without what is cut off at the end of the file: the decoder says what that means."""
    position = 12
    for _ in range(MAX_CHUNKS):
        if position + 8 > len(data):
            return
        kind, length = struct.unpack_from("<4sI", data, position)
        yield kind, position + 8, min(position + 8 + length, len(data))
        position += 8 + length + length % 2
    raise broken("WebP", f"more than {MAX_CHUNKS} chunks")


def _size(kind: bytes, body: bytes) -> tuple[int, int]:
    """(height, width), from the first chunk."""
    if kind == b"VP8X":
        return 1 + int.from_bytes(body[7:10], "little"), 1 + int.from_bytes(body[4:7], "little")
    if kind == b"VP8L" and body[:1] == b"\x2f":
        (bits,) = struct.unpack_from("<I", body, 1)
        return 1 + (bits >> 14 & 0x3FFF), 1 + (bits & 0x3FFF)
    if kind == b"VP8 " and body[3:6] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", body, 6)
        return height & 0x3FFF, width & 0x3FFF
    raise broken("WebP", "it does not start with a picture")
