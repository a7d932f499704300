"""How many threads the model gets: the one place where that is decided."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CPU_DIR = Path("/sys/devices/system/cpu")
_CGROUP_DIR = Path("/sys/fs/cgroup")


def default_num_threads() -> int | None:
    """The physical cores this process may use; None, that is no opinion, where OMP_NUM_THREADS says
    something or the system does not tell.

    Two threads on one core share its arithmetic units; those beyond a container's quota only wait for one another.
    """
    if os.environ.get("OMP_NUM_THREADS") or not hasattr(os, "sched_getaffinity"):
        return None
    return available_cores(os.sched_getaffinity(0), _CPU_DIR, _CGROUP_DIR)


def available_cores(cpus: set[int], cpu_dir: Path, cgroup_dir: Path) -> int:
    """Physical cores among `cpus`, but no more than the cgroup's quota (version 1 or 2) pays for; at least 1.

    `cpu_dir` and `cgroup_dir` describe both as below `/sys`; what cannot be read limits nothing.
    """
    # Siblings on one core have the same list; a CPU that has none counts for itself.
    cores = {_read(cpu_dir / f"cpu{cpu}" / "topology" / "thread_siblings_list") or str(cpu) for cpu in cpus}
    return max(1, min(len(cores), math.ceil(_quota_cores(cgroup_dir))))


def _quota_cores(cgroup_dir: Path) -> float:
    quota, _, period = _read(cgroup_dir / "cpu.max").partition(" ")
    if not quota:
        quota = _read(cgroup_dir / "cpu" / "cpu.cfs_quota_us")
        period = _read(cgroup_dir / "cpu" / "cpu.cfs_period_us")
    limited = quota.isdecimal() and period.isdecimal() and int(period) > 0
    return int(quota) / int(period) if limited else 1 << 20


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
