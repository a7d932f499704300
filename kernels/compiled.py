"""Where the kernels written in C are found: `kernels/cpu/`, compiled once for each instruction set and element type.

They are compiled when Foreword is installed; without a compiler they are simply missing. They are not linked with an
OpenMP runtime but use the one that torch has loaded, and thereby torch's threads: two runtimes would each keep threads
of their own spinning on the same cores.

What they export takes pointers to structures and integers only, whose shapes are written down in Python again. So a
library of other sources than lie beside it is refused.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path

import torch  # brings the OpenMP runtime

from .sources import sources_digest

_SOURCES = Path(__file__).parent / "cpu"
# The best first.
INSTRUCTION_SETS = ("avx512", "avx2", "portable")
# As in cpu/element.h.
PANEL = 32
INPUTS_PER_STEP = {torch.bfloat16: 2, torch.float32: 1}
ELEMENT_TYPES = {torch.bfloat16: "bf16", torch.float32: "f32"}


@functools.cache
def library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The best there is for this CPU and tensors of `dtype`; None if there is none.

    Raises:
        RuntimeError: there is one of other sources.
    """
    return next((found for name in INSTRUCTION_SETS if (found := load(name, dtype)) is not None), None)


@functools.cache
def load(instruction_set: str, dtype: torch.dtype) -> ctypes.CDLL | None:
    """One of them; None where it was not built, does not load or is not for this CPU. Raises as `library`."""
    if dtype not in ELEMENT_TYPES:
        return None
    spec = importlib.util.find_spec(f"{__package__}._{instruction_set}_{ELEMENT_TYPES[dtype]}")
    if spec is None or spec.origin is None:
        return None
    try:
        found = ctypes.CDLL(spec.origin)
    except OSError:  # a torch without an OpenMP runtime of this kind
        return None
    _check_sources(found, Path(spec.origin).name)
    return found if found.is_supported() else None


def _check_sources(found: ctypes.CDLL, name: str) -> None:
    expected = sources_digest(_SOURCES)
    try:
        found.compiled_from.restype = ctypes.c_char_p
        actual = found.compiled_from().decode()
    except AttributeError:  # from before they told
        actual = None
    if expected is not None and actual != expected:
        raise RuntimeError(f"{name} was compiled from other sources than those in {_SOURCES}: install Foreword again")
