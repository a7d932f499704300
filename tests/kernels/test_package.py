"""The package's name is shared with a distribution that is not ours: both ways this can hurt are caught."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import kernels


def test_importing_the_package_loads_no_torch() -> None:
    code = "import kernels, sys; kernels.check_installation(); sys.exit('torch' in sys.modules)"
    root = Path(kernels.__path__[0]).parent
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False, timeout=60).returncode == 0


def test_a_foreign_distribution_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.check_installation()

    info = tmp_path / "kernels-0.18.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.5\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert metadata.version("kernels") == "0.18.5"
    with pytest.raises(kernels.InstallationError, match=r"'kernels' 0\.18\.5 is installed.*pip uninstall kernels"):
        kernels.check_installation()
