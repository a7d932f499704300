from __future__ import annotations

from kernels.lora import expand_kernel, expand_options, shrink_kernel, shrink_options
from tests.kernels.specimens import Specimen

_TABLES = ("ranks", "rows", "tiles", "column_tiles")
_STRIDES = ("x_stride", "output_stride")
_SIZES = ("num_rows", "num_slices", "max_rank", "in_features", "out_features", "num_splits")


def _arguments(kernel, dtype: str) -> dict[str, str]:  # type: ignore[no-untyped-def]
    every = {
        **dict.fromkeys(("output", "x", "a", "b"), f"*{dtype}"),
        **dict.fromkeys(("shrunk", "scaling"), "*fp32"),
        **dict.fromkeys(_TABLES, "*i32"),
        **dict.fromkeys((*_STRIDES, *_SIZES), "i32"),
    }
    return {name: every[name] for name in kernel.arg_names if name in every}


SPECIMENS = [
    Specimen(
        f"{dtype} rank {max_rank} tiles of {tokens}",
        kernel,
        _arguments(kernel, dtype),
        options(max_rank, tokens, element_bytes),
    )
    for dtype, element_bytes in (("bf16", 2), ("fp32", 4))
    for max_rank in (64, 32, 16)
    for tokens in (64, 16)
    for kernel, options in ((shrink_kernel, shrink_options), (expand_kernel, expand_options))
]
