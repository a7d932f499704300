from __future__ import annotations

from kernels.gated_activation import gated_activation_kernel, launch_options
from tests.kernels.specimens import Specimen

SPECIMENS = [
    Specimen(
        f"{dtype}{' gelu' if is_gelu else ''}",
        gated_activation_kernel,
        {
            **dict.fromkeys(("output", "gate", "up"), f"*{dtype}"),
            **dict.fromkeys(("gate_stride", "up_stride", "size", "blocks_per_row"), "i32"),
        },
        {"IS_GELU": is_gelu, **launch_options()},
    )
    for dtype in ("fp32", "bf16", "fp16")
    for is_gelu in (True, False)
]
