"""JPEG. Of several pictures in one file (MPO: a phone's depth map, a second eye) the first one counts."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

from . import directory
from .header import ImageHeader, broken

SIGNATURE = b"\xff\xd8\xff"
MAX_SEGMENTS = 4096
MAX_SCANS = 100
"""Encoders write about ten. Each costs a few bytes in the file and a walk over the whole picture when it is decoded."""
START_OF_SCAN = 0xDA
APPLICATION = range(0xE0, 0xF0)
COMMENT = 0xFE
FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_FILL = re.compile(rb"\xff*")
"""Before a marker there may be any number of them. Always matches."""
STANDALONE = {0x01, *range(0xD0, 0xD9)}


class Segment(NamedTuple):
    """`start` is where its marker begins, `body` where the content behind marker and length begins."""

    marker: int
    start: int
    body: int
    end: int


def starts(data: bytes) -> bool:
    return data.startswith(SIGNATURE)


def read_header(data: bytes, max_frames: int) -> ImageHeader:
    orientation = None
    size = None
    for marker, _, body, end in _segments(data):
        if marker in FRAMES and size is None:
            size = struct.unpack_from(">HH", data, body + 1)
        elif marker == 0xE1 and orientation is None and data.startswith(directory.EXIF_PREFIX, body):
            orientation = directory.orientation(data[body:end])
    if size is None:
        raise broken("JPEG", "it does not say its size")
    return ImageHeader(size[0], size[1], orientation or 1)


def only_pixels(data: bytes) -> bytes:
    """The same picture without profiles, thumbnails, comments and the like."""
    if data.count(b"\xff\xda") > MAX_SCANS:
        raise broken("JPEG", f"more than {MAX_SCANS} scans")
    kept = [data[:2]]
    for marker, start, body, end in _segments(data):
        if marker == START_OF_SCAN:
            kept.append(data[start:])
        elif marker not in APPLICATION and marker != COMMENT:
            kept.append(data[start:end])
        elif data.startswith((b"JFIF", b"Adobe"), body):
            kept.append(data[start:end])  # they say what the components mean
    return b"".join(kept)


def _segments(data: bytes) -> Iterator[Segment]:
    """All up to the first scan, that one included."""
    position = 2
    for _ in range(MAX_SEGMENTS):
        position = max(position, _FILL.match(data, position).end() - 1)  # type: ignore[union-attr]
        if position + 4 > len(data):
            raise broken("JPEG", "it is cut off")
        if data[position] != 0xFF:
            raise broken("JPEG", "no segment where one should begin")
        marker = data[position + 1]
        if marker in STANDALONE:
            position += 2
            continue
        length = struct.unpack_from(">H", data, position + 2)[0]
        segment = Segment(marker, position, position + 4, position + 2 + length)
        if length < 2 or segment.end > len(data):
            raise broken("JPEG", "a segment does not end")
        yield segment
        if marker == START_OF_SCAN:
            return
        position = segment.end
    raise broken("JPEG", f"more than {MAX_SEGMENTS} segments")
