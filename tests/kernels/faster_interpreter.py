"""Makes Triton's interpreter patch its language once per launch, not again for every function a kernel calls.

`tl.sum`, `tl.zeros` and our own helpers are such functions; patching takes half a millisecond, most of a test's time.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_patch_lang = interpreter._patch_lang


def _patch_what_is_not(function: FunctionType) -> Any:
    modules = [value for value in function.__globals__.values() if value is tl or value is tl.core]
    # What is patched is no builtin any more.
    if modules and not any(tl.core.is_builtin(module.load) for module in modules):
        return interpreter._LangPatchScope()
    return _patch_lang(function)


def install() -> None:
    interpreter._patch_lang = _patch_what_is_not
