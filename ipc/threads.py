"""How many threads each process gets: the one place where that is decided.

Only the model computes all the time. It gets every core: its threads wait for one another many times in a step, so it
is as fast as the slowest of them, and what else runs must be short. The HTTP process is that: one thread for the event
loop, few for each kind of work that would hold it up (`WORKER_THREADS`), and no pool of a library beside them. (NumPy's
keeps threads, but nothing multiplies matrices there.) Engines cannot see one another: several on one machine need
`--num-threads`, or `taskset`.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

# How many short prompts, and how many pictures, a frontend works on at a time: with one, each would wait for the one
# before; more would be taken from the model.
WORKER_THREADS = 2

# 1,000 turns are microseconds. By default an OpenMP thread that waits for another spins for milliseconds; with anything
# else running on the same cores it thereby keeps off the one it waits for.
_SPIN_COUNT = "1000"

_CPU_DIR = Path("/sys/devices/system/cpu")
_CGROUP_DIR = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def model_threads() -> int | None:
    """The physical cores this process may use; None, that is no opinion, where OMP_NUM_THREADS says
    something or the system does not tell.

    Two threads on one core share its arithmetic units; those beyond a container's quota only wait for one another.
    """
    if os.environ.get("OMP_NUM_THREADS") or not hasattr(os, "sched_getaffinity"):
        return None
    return available_cores(os.sched_getaffinity(0), _CPU_DIR, _CGROUP_DIR, _read(_OWN_CGROUPS))


def limit_spinning() -> None:
    """Let this process's OpenMP threads spin for a moment only, unless the user says how they wait.

    To be called before torch is loaded.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = _SPIN_COUNT


def tokenize_where_called() -> None:
    """Keep the tokenizers' library from threads of its own. To be called before the first text is tokenized.

    Each prompt is tokenized in a thread already; a shared pool would let a long prompt hold up short ones.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def available_cores(cpus: set[int], cpu_dir: Path, cgroup_dir: Path, own_cgroups: str = "") -> int:
    """Physical cores among `cpus`, but no more than the quotas of its cgroups (version 1 or 2) pay for; at least 1.

    `cpu_dir` and `cgroup_dir` describe both as below `/sys`, `own_cgroups` is as `/proc/self/cgroup`; what cannot be
    read limits nothing.
    """
    # Siblings on one core have the same list; a CPU that has none counts for itself.
    cores = {_read(cpu_dir / f"cpu{cpu}" / "topology" / "thread_siblings_list") or str(cpu) for cpu in cpus}
    # That of a container looks like the root from inside; elsewhere (a systemd unit) it lies below.
    groups = {cgroup_dir, cgroup_dir / "cpu"}
    for line in own_cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            root = cgroup_dir / "cpu" if controllers else cgroup_dir
            group = root / path.lstrip("/")
            groups |= {group, *group.parents}
    return max(1, min(len(cores), *(math.ceil(_quota_cores(group)) for group in groups)))


def _quota_cores(cgroup: Path) -> float:
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    if not quota:
        quota, period = _read(cgroup / "cpu.cfs_quota_us"), _read(cgroup / "cpu.cfs_period_us")
    limited = quota.isdecimal() and period.isdecimal() and int(period) > 0
    return int(quota) / int(period) if limited else 1 << 20


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
