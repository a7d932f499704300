from __future__ import annotations

from kernels.lora import expand_kernel, expand_options, shrink_kernel, shrink_options
from tests.kernels.specimens import Specimen

_TABLES = ("ranks", "rows", "tiles", "column_tiles")
_MULTIPLES = ("x_stride", "output_stride", "max_rank", "in_features", "out_features")


def _arguments(kernel, dtype: str, suffix: str) -> dict[str, str]:  # type: ignore[no-untyped-def]
    every = {
        **dict.fromkeys(("output", "x", "a", "b"), f"*{dtype}:16"),
        **dict.fromkeys(("shrunk", "scaling"), "*fp32:16"),
        **dict.fromkeys(_TABLES, "*i32:16"),
        **dict.fromkeys(_MULTIPLES, f"i32{suffix}"),
        **dict.fromkeys(("num_rows", "num_slices", "num_splits"), "i32"),
    }
    return {name: every[name] for name in kernel.arg_names if name in every}


SPECIMENS = [
    Specimen(
        f"{dtype} rank {max_rank} tiles of {tokens}{'' if suffix else ' odd sizes'}",
        kernel,
        _arguments(kernel, dtype, suffix),
        options(max_rank, tokens, element_bytes),
    )
    for suffix in (":16", "")
    for dtype, element_bytes in (("bf16", 2), ("fp32", 4))
    for max_rank in (64, 32, 16)
    for tokens in (64, 16)
    for kernel, options in ((shrink_kernel, shrink_options), (expand_kernel, expand_options))
]
