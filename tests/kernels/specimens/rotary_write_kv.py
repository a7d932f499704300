from __future__ import annotations

from itertools import product

from kernels.rotary_write_kv import launch_options, rotary_write_kv_kernel
from tests.kernels.specimens import Specimen
from tests.kernels.specimens.write_kv import SCALES

_STRIDES = [
    f"{name}_stride"
    for of in ("output", "key_slot", "value_slot", "query", "key", "value")
    for name in (of, f"{of}_head")
] + ["cos_stride", "cos_pair_stride", "sin_stride", "sin_pair_stride"]


def specimen(
    dtype: str,
    angles_dtype: str,
    num_heads: int,
    head_dim: int,
    num_pairs: int,
    interleaved: bool,
    codes: str | None = None,
) -> Specimen:
    return Specimen(
        f"{num_heads} heads of {head_dim} {dtype}, {num_pairs} pairs by {angles_dtype}"
        f"{' interleaved' if interleaved else ''}{f' into {codes}' if codes else ''}",
        rotary_write_kv_kernel,
        {
            **dict.fromkeys(("key_cache", "value_cache"), f"*{codes or dtype}"),
            **dict.fromkeys(SCALES, "*fp32"),
            **dict.fromkeys(("output", "query", "key", "value"), f"*{dtype}"),
            **dict.fromkeys(("cos", "sin"), f"*{angles_dtype}"),
            "slots": "*i64",
            **dict.fromkeys(_STRIDES, "i32"),
            **dict.fromkeys(("num_heads", "num_kv_heads", "num_pairs", "num_left", "value_head_dim"), "i32"),
        },
        {
            "INTERLEAVED": interleaved,
            **({} if codes else dict.fromkeys(SCALES)),
            # Triton makes a constant of a 1.
            **({"num_kv_heads": 1, "cos_pair_stride": 1, "sin_pair_stride": 1} if num_heads < 8 else {}),
            **({"num_heads": 1} if num_heads == 1 else {}),
            **launch_options(num_heads, head_dim, num_pairs, head_dim),
        },
    )


HEADS = ((64, 256, 64), (32, 128, 64), (3, 80, 16), (1, 32, 16))
SPECIMENS = [
    specimen(*types, *heads, interleaved)
    for types, heads, interleaved in product(
        (("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "fp32")), HEADS, (True, False)
    )
]
