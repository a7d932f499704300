from __future__ import annotations

from kernels.merge_parts import launch_options, merge_parts_kernel
from tests.kernels.specimens import Specimen

SPECIMENS = [
    Specimen(
        f"{dtype}, {num_heads} heads of {value_dim}{' sinks' if has_sinks else ''}",
        merge_parts_kernel,
        {
            **dict.fromkeys(("output", "sinks"), f"*{dtype}:16"),
            **dict.fromkeys(("parts", "part_logs"), "*fp32:16"),
            "merged": "*i32:16",
        },
        {"NUM_HEADS": num_heads, "VALUE_DIM": value_dim, "HAS_SINKS": has_sinks, **launch_options(value_dim)},
    )
    for num_heads, value_dim in ((32, 256), (9, 64), (32, 80), (64, 128))
    for dtype in ("bf16", "fp32")
    for has_sinks in (True, False)
]
