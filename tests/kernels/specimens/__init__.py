"""What is compiled ahead of time: for each kernel a module with `SPECIMENS`, the first of which CI compiles."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Specimen:
    """A kernel as some launch would compile it.

    Args:
        name: what is special about it.
        kernel: the jitted function.
        arguments: types of what is no constant, as Triton spells them: `*bf16`, `i32`, `fp32`; `:16` behind it says
            that a launch finds a multiple of 16, as torch's addresses are: only then are loads as wide as can be.
        options: constants and compile options, as the kernel's `launch_options` gives them.
    """

    name: str
    kernel: Any
    arguments: Mapping[str, str]
    options: Mapping[str, Any]


def all_specimens() -> Iterator[tuple[str, list[Specimen]]]:
    """Of each module here: its name and its `SPECIMENS`."""
    for module in pkgutil.iter_modules(__path__):
        yield module.name, importlib.import_module(f"{__name__}.{module.name}").SPECIMENS
