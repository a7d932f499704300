"""Compile the kernels for GPUs that are not there, and say what they take: registers, stack, shared memory.

    python -m tests.kernels.ahead_of_time [--all]

One line of JSON for each specimen and target; without `--all` only the first of each kernel, and for the newest target.
Not with `TRITON_INTERPRET`: there is nothing to compile then.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels.specimens import Specimen, all_specimens

CAPABILITIES = (80, 90)
# What a program may have of shared memory, by compute capability.
MAX_SHARED_BYTES = {80: 166_912, 90: 232_448}
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True, slots=True)
class Compiled:
    """`stack_bytes` beyond 0 means that registers did not suffice."""

    kernel: str
    specimen: str
    capability: int
    num_registers: int
    stack_bytes: int
    shared_bytes: int


def compile_for(specimen: Specimen, capability: int) -> Compiled:
    """Raises what Triton raises for a kernel that does not compile."""
    names = specimen.kernel.arg_names
    constants = {name: value for name, value in specimen.options.items() if name in names}
    options = {name: value for name, value in specimen.options.items() if name not in names}
    types = {name: "constexpr" if name in constants else specimen.arguments[name] for name in names}
    source = ASTSource(
        specimen.kernel,
        {name: spelled.removesuffix(":16") for name, spelled in types.items()},
        constants,
        {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if types[name].endswith(":16")},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    usage = _resource_usage(compiled.asm["cubin"])
    return Compiled(
        specimen.kernel.__name__,
        specimen.name,
        capability,
        num_registers=usage["REG"],
        stack_bytes=usage["STACK"],
        shared_bytes=compiled.metadata.shared,
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """What `cuobjdump` says of the only function in there."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        printed = subprocess.run(
            [_CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED):(\d+)", printed)}


def compile_one(name: str, place: int, capability: int) -> Compiled:
    """The specimen at a place in those of this name: kernels themselves cannot be sent to another process."""
    return compile_for(dict(all_specimens())[name][place], capability)


def main(every: bool) -> Iterator[Compiled]:
    chosen = [
        (name, place, capability)
        for name, specimens in all_specimens()
        for place, capability in (
            itertools.product(range(len(specimens)), CAPABILITIES) if every else [(0, max(CAPABILITIES))]
        )
    ]
    with ProcessPoolExecutor() as processes:
        yield from processes.map(compile_one, *zip(*chosen, strict=True))


if __name__ == "__main__":
    for result in main("--all" in sys.argv):
        print(json.dumps(asdict(result)), flush=True)
