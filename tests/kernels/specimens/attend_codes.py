"""Attention over quantized caches."""

from __future__ import annotations

from tests.kernels.specimens.tiled_attention import CODES, EVERYTHING, specimen

SHAPES = {
    "bf16": ((32, 4, 128), (9, 3, 64), (32, 32, 80), (8, 4, 256)),
    "fp16": ((32, 8, 128),),
    "fp32": ((32, 4, 128), (9, 3, 64), (8, 4, 256)),
}
SPECIMENS = [
    specimen(dtype, *heads, width, variant, codes)
    for dtype, shapes in SHAPES.items()
    for heads in shapes
    for width in ("narrow", "wide")
    for codes in CODES
    for variant in ("", EVERYTHING)
]
