"""What computes besides the model's own layers (docs/kernels.md). Importing the package itself loads no torch.

The folder's name is a trap: a distribution called `kernels`, which Foreword does not use, installs the same
folder, and `transformers` asks the version of whatever provides it. So Foreword's own version stays outside
`[0.18.2, 0.19.0)`, the range in which `transformers` would use that other package, and `check_installation` is
called before a model is loaded.
"""

from __future__ import annotations

from importlib import metadata


class InstallationError(RuntimeError):
    """Another distribution sits where Foreword's own package should be."""


def check_installation() -> None:
    """Make sure that nothing else is installed under this package's name.

    Raises:
        InstallationError: naming the distribution to remove.
    """
    try:
        version = metadata.version("kernels")
    except metadata.PackageNotFoundError:
        return
    raise InstallationError(
        f"the distribution 'kernels' {version} is installed and shares its folder with Foreword's package"
        f" ({__path__[0]}); run: pip uninstall kernels, then install foreword again"
    )
