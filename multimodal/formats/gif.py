"""GIF. The first frame counts."""

from __future__ import annotations

import struct

from .header import ImageHeader, broken

SIGNATURES = (b"GIF87a", b"GIF89a")
MAX_BLOCKS = 1 << 19
"""A block holds up to 255 bytes of a picture; this many can be walked in tens of milliseconds."""
EXTENSION, FRAME, TRAILER = b"!", b",", b";"


def starts(data: bytes) -> bool:
    return data.startswith(SIGNATURES)


def read_header(data: bytes, max_frames: int) -> ImageHeader:
    """Frames are counted by stepping over their data, block by block, without decoding any, up to `max_frames` + 1.

    A frame that stands out from the screen makes it larger, as in Pillow.
    """
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    position = 13 + _palette_bytes(flags)
    num_frames = num_blocks = 0
    while num_frames <= max_frames:
        kind = data[position : position + 1]
        if kind == EXTENSION:
            position += 2
        elif kind == FRAME:
            left, top, frame_width, frame_height, flags = struct.unpack_from("<4HB", data, position + 1)
            if num_frames == 0:
                width, height = max(width, left + frame_width), max(height, top + frame_height)
            num_frames += 1
            position += 11 + _palette_bytes(flags)
        elif kind == TRAILER or num_frames:
            break  # viewers show a file whose end is missing, as long as the first frame is whole
        else:
            raise broken("GIF", "it has no frame")
        while position < len(data) and (length := data[position]):
            position += 1 + length
            num_blocks += 1
            if num_blocks > MAX_BLOCKS:
                raise broken("GIF", f"more than {MAX_BLOCKS} blocks of data")
        position += 1
    if num_frames == 0:
        raise broken("GIF", "it has no frame")
    return ImageHeader(height, width, num_frames=num_frames)


def only_pixels(data: bytes) -> bytes:
    return data


def _palette_bytes(flags: int) -> int:
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0
