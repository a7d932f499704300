"""The model gets as many threads as there are physical cores for this process, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from ipc.threads import available_cores, model_threads


def system(tmp_path: Path, siblings: dict[int, str], files: dict[str, str]) -> tuple[Path, Path]:
    """A directory of CPUs with their siblings, and one of a cgroup."""
    for cpu, text in siblings.items():
        topology = tmp_path / "cpu" / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(text + "\n")
    for name, text in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return tmp_path / "cpu", tmp_path / "cgroup"


# Four cores of two threads each.
SIBLINGS = {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}


@pytest.mark.parametrize(
    ("cpus", "files", "num_cores"),
    [
        (range(8), {}, 4),
        ({0, 4}, {}, 1),
        ({0, 1, 5}, {}, 2),
        (range(8), {"cpu.max": "max 100000"}, 4),
        (range(8), {"cpu.max": "200000 100000"}, 2),
        (range(8), {"cpu.max": "250000 100000"}, 3),
        (range(8), {"cpu.max": "20000 100000"}, 1),
        (range(8), {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        (range(8), {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 4),
        (range(8), {"cpu.max": "nonsense"}, 4),
    ],
)
def test_cores(tmp_path: Path, cpus: set[int], files: dict[str, str], num_cores: int) -> None:
    assert available_cores(set(cpus), *system(tmp_path, SIBLINGS, files)) == num_cores


@pytest.mark.parametrize(
    ("own_cgroups", "files", "num_cores"),
    [
        ("0::/a.slice/b.service", {"a.slice/b.service/cpu.max": "200000 100000"}, 2),
        ("0::/a.slice/b.service", {"a.slice/cpu.max": "100000 100000", "a.slice/b.service/cpu.max": "max 100000"}, 1),
        ("0::/a.slice/b.service", {"c.slice/cpu.max": "100000 100000"}, 4),
        ("0::/../outside", {}, 4),
        (
            "5:memory:/a\n3:cpu,cpuacct:/b",
            {"cpu/b/cpu.cfs_quota_us": "300000", "cpu/b/cpu.cfs_period_us": "100000"},
            3,
        ),
        ("2:cpuset:/b", {"cpu/b/cpu.cfs_quota_us": "300000", "cpu/b/cpu.cfs_period_us": "100000"}, 4),
    ],
)
def test_cores_of_a_cgroup_below(tmp_path: Path, own_cgroups: str, files: dict[str, str], num_cores: int) -> None:
    directories = system(tmp_path, SIBLINGS, files)
    assert available_cores(set(range(8)), *directories, own_cgroups) == num_cores


def test_a_system_that_tells_nothing_of_its_cpus(tmp_path: Path) -> None:
    assert available_cores({0, 1, 2}, tmp_path / "none", tmp_path / "none") == 3


def test_what_the_user_says_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert model_threads() is None
    monkeypatch.delenv("OMP_NUM_THREADS")
    num_threads = model_threads()
    assert num_threads is not None and num_threads >= 1
