"""What `pyproject.toml` has no stable words for: the compiled kernels."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            # Loaded with ctypes: the compiler needs no header of Python.
            f"kernels._{name}",
            [f"kernels/{name}.c"],
            depends=["kernels/bf16.h"],
            # Not for the linker as well: kernels/compiled.py says why.
            extra_compile_args=["-O3", "-fopenmp"],
            # Foreword works without it.
            optional=True,
        )
        for name in ("attention", "linear")
    ]
)
