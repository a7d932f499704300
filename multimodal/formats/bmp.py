"""Windows bitmaps, without run-length coded ones: Pillow decodes those in Python, a byte at a time."""

from __future__ import annotations

import struct

from multimodal.errors import MediaError

from .header import ImageHeader, broken

SIGNATURE = b"BM"
CORE_HEADER_BYTES = 12
HEADER_BYTES = {CORE_HEADER_BYTES, 40, 52, 56, 64, 108, 124}
RUN_LENGTH = {1, 2}


def starts(data: bytes) -> bool:
    return data.startswith(SIGNATURE)


def read_header(data: bytes, max_frames: int) -> ImageHeader:
    (header_bytes,) = struct.unpack_from("<I", data, 14)
    if header_bytes not in HEADER_BYTES:
        raise broken("BMP", f"a header of {header_bytes} bytes")
    if header_bytes == CORE_HEADER_BYTES:
        width, height = struct.unpack_from("<HH", data, 18)
        return ImageHeader(height, width)
    width, height, _, _, compression = struct.unpack_from("<IiHHI", data, 18)
    if compression in RUN_LENGTH:
        raise MediaError("BMP images with run-length coding are not read")
    return ImageHeader(abs(height), width)  # negative: the first row is the top one


def only_pixels(data: bytes) -> bytes:
    return data
