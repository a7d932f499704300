"""Where the kernels written in C are found: `kernels/cpu/`, compiled once for each instruction set and element type.

They are compiled when Foreword is installed; without a compiler they are simply missing. They are not linked with an
OpenMP runtime but use the one that torch has loaded, and thereby torch's threads: two runtimes would each keep threads
of their own spinning on the same cores.

What they export takes pointers to structures and integers only.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util

import torch  # brings the OpenMP runtime

# The best first.
INSTRUCTION_SETS = ("avx512", "avx2", "portable")
ELEMENT_TYPES = {torch.bfloat16: "bf16", torch.float32: "f32"}


@functools.cache
def library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The best there is for this CPU and tensors of `dtype`; None if there is none."""
    return next((found for name in INSTRUCTION_SETS if (found := load(name, dtype)) is not None), None)


@functools.cache
def load(instruction_set: str, dtype: torch.dtype) -> ctypes.CDLL | None:
    """One of them; None where it was not built, does not load or is not for this CPU."""
    if dtype not in ELEMENT_TYPES:
        return None
    spec = importlib.util.find_spec(f"{__package__}._{instruction_set}_{ELEMENT_TYPES[dtype]}")
    if spec is None or spec.origin is None:
        return None
    try:
        found = ctypes.CDLL(spec.origin)
    except OSError:  # a torch without an OpenMP runtime of this kind
        return None
    return found if found.is_supported() else None
