"""Every Triton kernel compiles for sm_80 and sm_90, keeps to its registers and fits the shared memory there is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.wire_peers import ROOT

pytest.importorskip("triton", reason="Triton is not installed")

from tests.kernels.ahead_of_time import CAPABILITIES, MAX_SHARED_BYTES, Compiled
from tests.kernels.specimens import all_specimens


@pytest.mark.parametrize(
    "which", [pytest.param([], id="one"), pytest.param(["--all"], id="all", marks=pytest.mark.slow)]
)
@pytest.mark.timeout(3600)
def test_kernels_compile_without_spilling(which: list[str], tmp_path: Path) -> None:
    # In a process of its own: here they are interpreted.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.ahead_of_time", *which],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    compiled = [Compiled(**json.loads(line)) for line in result.stdout.splitlines()]
    num_targets = len(CAPABILITIES) if which else 1
    expected = sum(len(specimens) if which else 1 for _, specimens in all_specimens()) * num_targets
    assert len(compiled) == expected > 0
    spilling = [one for one in compiled if one.stack_bytes]
    too_large = [one for one in compiled if one.shared_bytes > MAX_SHARED_BYTES[one.capability]]
    assert not spilling and not too_large


def test_every_kernel_has_specimens() -> None:
    """A kernel is a function that `jit` made, is named `…_kernel` and is launched by its module."""
    import importlib
    import pkgutil

    import kernels

    names = {
        name
        for module in pkgutil.iter_modules(kernels.__path__)
        if not module.name.startswith("_")
        for name in vars(importlib.import_module(f"kernels.{module.name}"))
        if name.endswith("_kernel")
    }
    covered = {specimen.kernel.__name__ for _, specimens in all_specimens() for specimen in specimens}
    assert names == covered
