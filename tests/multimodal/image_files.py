"""Image files for tests: made by Pillow where it can, and byte by byte where it cannot."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image


def saved(image: Image.Image, file_format: str, **options: Any) -> bytes:
    """Saves copies: some of Pillow's writers leave their settings in what they wrote."""
    buffer = io.BytesIO()
    if "append_images" in options:
        options["append_images"] = [frame.copy() for frame in options["append_images"]]
    image.copy().save(buffer, file_format, **options)
    return buffer.getvalue()


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def smooth(height: int, width: int) -> np.ndarray:
    """Something that a lossy format keeps nearly as it is."""
    rows, columns = np.mgrid[0:height, 0:width]
    return np.stack([rows * 200 // height, columns * 200 // width, 200 - rows * 200 // height], axis=2).astype(np.uint8)


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, depth: int, color_type: int, rows: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    """`rows`: all rows' samples, packed. `chunks` come before the pixels."""
    row_bytes = len(rows) // height
    filtered = b"".join(b"\0" + rows[start : start + row_bytes] for start in range(0, len(rows), row_bytes))
    header = struct.pack(">IIBBBBB", width, height, depth, color_type, 0, 0, 0)
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            png_chunk(b"IHDR", header),
            *(png_chunk(kind, body) for kind, body in chunks),
            png_chunk(b"IDAT", zlib.compress(filtered)),
            png_chunk(b"IEND", b""),
        ]
    )


def huge_png(width: int, height: int) -> bytes:
    """A whole black picture of one bit for each pixel: small as a file, however large it is decoded."""
    compress = zlib.compressobj(1)
    block = bytes((1 + (width + 7) // 8) * 1000)
    body = b"".join(compress.compress(block) for _ in range(height // 1000)) + compress.flush()
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + png_chunk(b"IDAT", body) + png_chunk(b"IEND", b"")


def gif_of_frames(num_frames: int) -> bytes:
    """One pixel; red in the first frame, blue in the others."""
    palette = b"\xff\0\0" + b"\0\0\xff"
    head = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + palette
    frames = [
        b"," + struct.pack("<4HB", 0, 0, 1, 1, 0) + b"\x02\x02" + codes + b"\x00" for codes in (b"D\x01", b"L\x01")
    ]
    return head + frames[0] + frames[1] * (num_frames - 1) + b";"


def exif(orientation: int) -> bytes:
    made = Image.Exif()
    made[274] = orientation
    return made.tobytes()
