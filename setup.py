"""What `pyproject.toml` has no stable words for: the compiled kernel."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            # Loaded with ctypes: the compiler needs no header of Python.
            "kernels._linear",
            ["kernels/linear.c"],
            # Not for the linker as well: kernels/linear.py says why.
            extra_compile_args=["-O3", "-fopenmp"],
            # Foreword works without it.
            optional=True,
        )
    ]
)
