"""Triton where it is installed, and what every kernel of ours needs of it; without it, this module still imports.

A kernel's file says `from .triton_language import jit, tl` and decorates with `jit`; its launcher is only called where
`dispatch` found Triton. Whether kernels are compiled or interpreted (`TRITON_INTERPRET=1`) is settled when the file is
imported.

Rules that make a kernel right in both:

- Arithmetic is in float32 (or wider): load, `.to(tl.float32)`, compute, store; a store rounds to the pointer's type.
  The interpreter keeps bfloat16 as bare bits, so that even `a * b` of two of them is nonsense there; and it truncates
  where a GPU rounds to nearest, so tests allow a bfloat16 result one unit in the last place.
- Matrix products go through `dot`.
- Offsets into the cache and other large tensors are int64: `slot.to(tl.int64) * stride`.
- Results never depend on what masked lanes loaded: `other=` is given wherever a masked value takes part.
"""

from __future__ import annotations

from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:
    triton: Any = None  # type: ignore[no-redef]
    tl: Any = None  # type: ignore[no-redef]

IS_INSTALLED = triton is not None
IS_INTERPRETED = IS_INSTALLED and triton.knobs.runtime.interpret


def jit(function: Any) -> Any:
    """`triton.jit`; without Triton the function as it is, which nothing calls then."""
    return triton.jit(function) if IS_INSTALLED else function


def constant(value: Any) -> Any:
    """A value for use within kernels as a name of their module."""
    return tl.constexpr(value) if IS_INSTALLED else value


_WIDENS = constant(IS_INTERPRETED)


@jit
def dot(a, b, accumulator):  # type: ignore[no-untyped-def]
    """`accumulator + a @ b`, in float32 whatever the type of `a` and `b`, and never in tf32."""
    if _WIDENS:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), accumulator, input_precision="ieee")
    return tl.dot(a, b, accumulator, input_precision="ieee")


@jit
def from_integers(x, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Integers as numbers of a floating-point type, which a GPU has an instruction for and the interpreter has not."""
    return x.to(tl.float32).to(TYPE) if _WIDENS else x.to(TYPE)


def compile_options(num_warps: int, num_stages: int = 2) -> dict[str, Any]:
    """What a launch says besides its arguments. Multiplications and additions are fused, in every version of Triton."""
    return {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}


def next_power_of_2(value: int) -> int:
    """The smallest power of two that is at least `value` ≥ 1."""
    return 1 << (value - 1).bit_length()
