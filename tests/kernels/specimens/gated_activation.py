from __future__ import annotations

from kernels.gated_activation import gated_activation_kernel, launch_options
from tests.kernels.specimens import Specimen

SPECIMENS = [
    Specimen(
        f"{dtype}{' gelu' if is_gelu else ''}{'' if suffix else ' odd sizes'}",
        gated_activation_kernel,
        {
            **dict.fromkeys(("output", "gate", "up"), f"*{dtype}:16"),
            **dict.fromkeys(("gate_stride", "up_stride", "size"), f"i32{suffix}"),
            "blocks_per_row": "i32",
        },
        {"IS_GELU": is_gelu, **launch_options()},
    )
    for suffix in (":16", "")
    for dtype in ("fp32", "bf16", "fp16")
    for is_gelu in (True, False)
]
