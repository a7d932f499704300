"""What `pyproject.toml` has no stable words for: the compiled kernels."""

import platform
import runpy
from pathlib import Path

from setuptools import Extension, setup

SOURCES = Path("kernels/cpu")
# By its path: the package cannot be imported yet.
DIGEST = runpy.run_path("kernels/sources.py")["sources_digest"](SOURCES)
ON_X86 = platform.machine() in {"x86_64", "AMD64"}
INSTRUCTION_SETS = {
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "portable": [],
}
ELEMENT_TYPES = {"bf16": ["-DELEMENT_BF16=1"], "f32": []}
# Not for float32, too: many a CPU with AVX-512 has no bfloat16.
OF_BOTH = {("avx512", "bf16"): ["-mavx512bf16"]}

setup(
    ext_modules=[
        Extension(
            # Loaded with ctypes: the compiler needs no header of Python.
            f"kernels._{instruction_set}_{element_type}",
            sorted(str(path) for path in SOURCES.glob("*.c")),
            depends=sorted(str(path) for path in SOURCES.glob("*.h")),
            define_macros=[("SOURCES_DIGEST", f'"{DIGEST}"')],
            # OpenMP not for the linker as well: kernels/compiled.py says why.
            extra_compile_args=[
                *("-O3", "-fopenmp", "-fvisibility=hidden"),
                *(*instructions, *element, *OF_BOTH.get((instruction_set, element_type), ())),
            ],
            # Foreword works without it.
            optional=True,
        )
        for instruction_set, instructions in INSTRUCTION_SETS.items()
        for element_type, element in ELEMENT_TYPES.items()
        if ON_X86 or not instructions
    ],
)
