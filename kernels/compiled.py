"""Where the kernels written in C are found.

They are compiled when Foreword is installed; without a compiler they are simply missing. They are not linked with an
OpenMP runtime but use the one that torch has loaded, and thereby torch's threads: two runtimes would each keep threads
of their own spinning on the same cores.
"""

from __future__ import annotations

import ctypes
import importlib.util

import torch  # noqa: F401  brings the OpenMP runtime


def load(name: str) -> ctypes.CDLL | None:
    """The library that was built as `kernels.<name>`, or None where it was not or does not load."""
    spec = importlib.util.find_spec(f"{__package__}.{name}")
    if spec is None or spec.origin is None:
        return None
    try:
        return ctypes.CDLL(spec.origin)
    except OSError:  # a torch without an OpenMP runtime of this kind
        return None
