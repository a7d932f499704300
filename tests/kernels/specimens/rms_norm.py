from __future__ import annotations

from kernels.rms_norm import launch_options, rms_norm_kernel
from tests.kernels.specimens import Specimen

SPECIMENS = [
    Specimen(
        f"{hidden_size} {dtype}{' residual' if has_residual else ''}{' gemma' if unit_offset else ''}",
        rms_norm_kernel,
        {
            **dict.fromkeys(("output", "total", "x", "residual", "weight"), f"*{dtype}"),
            **dict.fromkeys(("x_stride", "residual_stride", "output_stride", "hidden_size"), "i32"),
            "eps": "fp32",
        },
        {"HAS_RESIDUAL": has_residual, "UNIT_OFFSET": unit_offset, **launch_options(hidden_size)},
    )
    for dtype in ("bf16", "fp32")
    for hidden_size in (4096, 576, 16384)
    for has_residual in (True, False)
    for unit_offset in (False, True)
]
