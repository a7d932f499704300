"""Foreword's own version."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def foreword_version() -> str:
    """The installed distribution's version; `0+uninstalled` when run from a source tree that is not installed."""
    try:
        return version("foreword")
    except PackageNotFoundError:
        return "0+uninstalled"
