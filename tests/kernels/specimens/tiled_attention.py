from __future__ import annotations

import torch

from kernels.attention_tiles import LayerHeads, launch_options
from kernels.tiled_attention import tiled_attention_kernel
from tests.kernels.specimens import Specimen

BLOCK_SIZE = 16
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


CODES = {"int8": ("*i8:16", torch.int8), "fp8": ("*u8:16", torch.float8_e4m3fn)}


def specimen(
    dtype: str, num_heads: int, num_kv_heads: int, head_dim: int, width: str, variant: str, codes: str | None = None
) -> Specimen:
    cache_type, code_dtype = CODES[codes] if codes else (f"*{dtype}:16", None)
    heads = LayerHeads(num_heads, num_kv_heads, head_dim, head_dim, DTYPES[dtype], code_dtype)
    slot_stride = num_kv_heads * head_dim
    strides = {"BLOCK_STRIDE": BLOCK_SIZE * slot_stride, "SLOT_STRIDE": slot_stride, "HEAD_STRIDE": head_dim}
    return Specimen(
        f"{dtype} {num_heads}/{num_kv_heads} heads of {head_dim}, {width}{variant and f', {variant}'}"
        f"{f', {codes} cached' if codes else ''}",
        tiled_attention_kernel,
        {
            **dict.fromkeys(("output", "query", "sinks"), f"*{dtype}:16"),
            **dict.fromkeys(("key_cache", "value_cache"), cache_type),
            **dict.fromkeys(("parts", "part_logs", "key_scales", "value_scales"), "*fp32:16"),
            **dict.fromkeys(("block_tables", "positions", "visible_to"), "*i32:16"),
            **dict.fromkeys(("tiles", "listed_tokens", "first_parts"), "*i32:16"),
            **dict.fromkeys(("query_token_stride", "query_head_stride", "table_stride"), "i32:16"),
            "window": "i32",
            **dict.fromkeys(("scale", "softcap"), "fp32"),
        },
        {
            **({} if codes else {"key_scales": None, "value_scales": None}),
            **{f"{cache}_{name}": stride for cache in ("KEY", "VALUE") for name, stride in strides.items()},
            "BLOCK_SIZE": BLOCK_SIZE,
            "HAS_WINDOW": "window" in variant,
            "HAS_SOFTCAP": "softcap" in variant,
            "HAS_SINKS": "sinks" in variant,
            "SEES_AHEAD": "ahead" in variant,
            **launch_options(heads, is_wide=width == "wide"),
        },
    )


EVERYTHING = "window softcap sinks ahead"
SHAPES = {
    "bf16": ((32, 4, 128), (9, 3, 64), (32, 32, 80), (8, 4, 256), (71, 1, 64)),
    "fp32": ((32, 4, 128), (9, 3, 64), (8, 4, 256)),
}
SPECIMENS = [
    specimen("bf16", 32, 4, 256, "wide", EVERYTHING),
    *(
        specimen(dtype, *heads, width, variant)
        for dtype, shapes in SHAPES.items()
        for heads in shapes
        for width in ("narrow", "wide")
        for variant in ("", EVERYTHING)
    ),
    # As in Gemma 2, Gemma 3, GPT-OSS.
    specimen("bf16", 8, 4, 256, "wide", "window softcap"),
    specimen("bf16", 8, 4, 256, "wide", "window ahead"),
    specimen("bf16", 64, 8, 64, "wide", "window sinks"),
]
