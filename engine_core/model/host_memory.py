"""How much memory this process could take without hurting anybody, as Linux and its control groups have it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class _Hierarchy:
    """Where a version of control groups keeps its numbers. Caches are given back when somebody needs the memory."""

    mount: str
    limits: tuple[str, ...]
    usage: str
    caches: tuple[str, ...]


_VERSION_1 = _Hierarchy(
    "sys/fs/cgroup/memory",
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_VERSION_2 = _Hierarchy(
    "sys/fs/cgroup", ("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file")
)


def available_memory_bytes(root: Path = Path("/")) -> int:
    """What could be allocated without swapping: the kernel's estimate, or what is left in this process's control group
    or any group around it, whichever is least. File caches count as free. `root` is where `/proc` and `/sys` are found.
    """
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    return min([available, *_left_in_groups(root)])


def give_back_freed_memory() -> None:
    """What was freed goes back to the system, where the C library keeps it for itself otherwise (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _left_in_groups(root: Path) -> Iterator[int]:
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            hierarchy = _VERSION_2
        elif "memory" in controllers.split(","):
            hierarchy = _VERSION_1
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        # In a container the path may be the host's, of which only the mounted end exists here.
        for directory in (group, *group.parents):
            yield from _left_in_group(root / hierarchy.mount / directory, hierarchy)


def _left_in_group(directory: Path, hierarchy: _Hierarchy) -> Iterator[int]:
    limits = [int(text) for name in hierarchy.limits if (text := _read(directory / name).strip()).isdigit()]
    used = _read(directory / hierarchy.usage).strip()
    if not limits or not used:
        return
    caches = 0
    for line in _read(directory / "memory.stat").splitlines():
        name, number = line.split()
        if name in hierarchy.caches:
            caches += int(number)
    yield max(0, min(limits) - (int(used) - caches))


def _read(file: Path) -> str:
    """The file's text; empty where there is none, or none for us."""
    try:
        return file.read_text()
    except OSError:
        return ""
