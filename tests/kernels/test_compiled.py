"""The kernels in C are built where there is a compiler, and share torch's threads."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernels
from kernels import compiled
from kernels.compiled import ELEMENT_TYPES, INSTRUCTION_SETS, library, load
from kernels.sources import sources_digest

ROOT = Path(kernels.__path__[0]).parent
needs_kernels = pytest.mark.skipif(library(torch.float32) is None, reason="no compiler")


def build(directory: Path, **env: str) -> dict[str, Path]:
    """The libraries that come of an installation into `directory`, by their kernels' names."""
    pytest.importorskip("setuptools")
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", directory, "--build-temp", directory / "temp"],
        cwd=ROOT,
        env={**os.environ, **env},
        check=True,
        capture_output=True,
        timeout=300,
    )
    return {path.name.split(".")[0].removeprefix("_"): path for path in (directory / "kernels").glob("_*")}


@pytest.mark.slow
@needs_kernels
def test_the_sources_build_without_warnings_and_into_what_is_called(tmp_path: Path) -> None:
    libraries = build(tmp_path, CFLAGS="-Wall -Wextra -Werror")
    on_any_cpu = {f"portable_{element}" for element in ELEMENT_TYPES.values()}
    assert on_any_cpu <= libraries.keys() <= {f"{s}_{e}" for s in INSTRUCTION_SETS for e in ELEMENT_TYPES.values()}
    for name in on_any_cpu:
        assert ctypes.CDLL(libraries[name]).is_supported() == 1


def test_installing_does_not_need_a_compiler(tmp_path: Path) -> None:
    assert build(tmp_path, CC="no-such-compiler") == {}


@needs_kernels
def test_what_computes_on_any_cpu_was_built() -> None:
    assert all(load("portable", element) is not None for element in ELEMENT_TYPES)


def test_what_was_not_built_is_missing() -> None:
    assert load("never_built", torch.float32) is None
    assert library(torch.float16) is None


@needs_kernels
def test_a_library_of_other_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_SOURCES", tmp_path)
    load.__wrapped__("portable", torch.float32)  # none lie beside it
    (tmp_path / "element.h").write_text("/* another one */")
    with pytest.raises(RuntimeError, match=r"_portable_f32.*other sources.*install Foreword again"):
        load.__wrapped__("portable", torch.float32)


def test_sources_differ_by_name_and_content(tmp_path: Path) -> None:
    digests = set()
    for number, files in enumerate(({"a.c": "x"}, {"b.c": "x"}, {"a.c": "y"}, {"a.c": "x", "b.h": ""})):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / "lora.o").write_text("no source")
        assert sources_digest(directory) is None
        for name, text in files.items():
            (directory / name).write_text(text)
        digests.add(sources_digest(directory))
    assert len(digests) == 4


@needs_kernels
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_torch_and_the_kernels_share_one_openmp_runtime_and_its_threads() -> None:
    code = """
import os, numpy as np, torch
from kernels.attention import attention
from kernels.attention_batch import plan_batch
from kernels.attention_tiles import LayerHeads
from kernels.linear import linear, pack_weight
torch.set_num_threads(3)
x, weight = torch.randn(64, 512).bfloat16(), torch.randn(512, 512).bfloat16()
torch.nn.functional.linear(x, weight)
before = len(os.listdir("/proc/self/task"))
linear(x, pack_weight(weight))
query, cache = x.view(64, 8, 64), x.view(1, 64, 8, 64)
step = np.array([0, 64]), np.array([64]), np.array([[0]]), 64, LayerHeads(8, 8, 64, 64, torch.bfloat16)
attention(query, cache, cache, plan_batch(*step, num_threads=3), scaling=0.1)
after = len(os.listdir("/proc/self/task"))
paths = {line.split()[-1] for line in open("/proc/self/maps")}
runtimes = [path for path in paths if any(name in path for name in ("libgomp", "libiomp", "libomp"))]
assert len(runtimes) == 1, runtimes
assert before == after, (before, after)
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
