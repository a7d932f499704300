from __future__ import annotations

from kernels.write_kv import launch_options, write_kv_kernel
from tests.kernels.specimens import Specimen

_STRIDES = [f"{name}_stride" for of in ("key_slot", "value_slot", "key", "value") for name in (of, f"{of}_head")]
SCALES = ("key_scales", "value_scales")


def specimen(dtype: str, cache_dtype: str, num_kv_heads: int, key_head_dim: int, value_head_dim: int) -> Specimen:
    return Specimen(
        f"{num_kv_heads} heads of {key_head_dim} and {value_head_dim} {dtype} into {cache_dtype}",
        write_kv_kernel,
        {
            **dict.fromkeys(("key_cache", "value_cache"), f"*{cache_dtype}"),
            **dict.fromkeys(SCALES, "*fp32"),
            **dict.fromkeys(("key", "value"), f"*{dtype}"),
            "slots": "*i64",
            **dict.fromkeys(_STRIDES, "i32"),
            **dict.fromkeys(("num_kv_heads", "key_head_dim", "value_head_dim"), "i32"),
        },
        {
            **launch_options(num_kv_heads, key_head_dim, value_head_dim),
            **({} if cache_dtype in ("i8", "u8") else dict.fromkeys(SCALES)),
            # Triton makes a constant of a 1.
            **({"num_kv_heads": 1} if num_kv_heads == 1 else {}),
        },
    )


SPECIMENS = [
    specimen(*types, *heads)
    for types in (("fp32", "fp32"), ("bf16", "bf16"), ("fp32", "bf16"))
    for heads in ((32, 256, 256), (8, 128, 128), (3, 80, 64), (1, 32, 32))
]
