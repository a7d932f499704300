from __future__ import annotations

from kernels.copy_blocks import copy_blocks_kernel, launch_options
from tests.kernels.specimens import Specimen

SPECIMENS = [
    Specimen(
        f"{width_bytes} bytes at a time",
        copy_blocks_kernel,
        {"table": "*i64", "copies": "*i64"},
        launch_options(width_bytes),
    )
    for width_bytes in (16, 8, 4, 2, 1)
]
