from __future__ import annotations

from kernels.rotary_write_kv import launch_options, rotary_write_kv_kernel
from tests.kernels.specimens import Specimen

_STRIDES = [
    f"{name}_stride"
    for of in ("output", "key_slot", "value_slot", "query", "key", "value")
    for name in (of, f"{of}_head")
] + ["cos_stride", "cos_pair_stride", "sin_stride", "sin_pair_stride"]

SPECIMENS = [
    Specimen(
        f"{num_heads} heads of {head_dim} {dtype}, {num_pairs} pairs by {angles_dtype}"
        f"{' interleaved' if interleaved else ''}",
        rotary_write_kv_kernel,
        {
            **dict.fromkeys(("output", "key_cache", "value_cache", "query", "key", "value"), f"*{dtype}"),
            **dict.fromkeys(("cos", "sin"), f"*{angles_dtype}"),
            "slots": "*i64",
            **dict.fromkeys(_STRIDES, "i32"),
            **dict.fromkeys(("num_heads", "num_kv_heads", "num_pairs", "num_left", "value_head_dim"), "i32"),
        },
        # Triton makes a constant of a 1.
        {
            "INTERLEAVED": interleaved,
            **({"num_kv_heads": 1, "cos_pair_stride": 1, "sin_pair_stride": 1} if num_heads < 8 else {}),
            **({"num_heads": 1} if num_heads == 1 else {}),
            **launch_options(num_heads, head_dim, num_pairs, head_dim),
        },
    )
    for dtype, angles_dtype in (("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "fp32"))
    for num_heads, head_dim, num_pairs in ((64, 256, 64), (32, 128, 64), (3, 80, 16), (1, 32, 16))
    for interleaved in (True, False)
]
