"""What this process may take is the least of what the machine has and what its control groups leave."""

from __future__ import annotations

from pathlib import Path

from engine_core.model.host_memory import available_memory_bytes

GIB = 1 << 30
UNLIMITED_V1 = 9223372036854771712


def make_machine(root: Path, *, available_bytes: int, own_groups: str) -> Path:
    write(root / "proc/meminfo", f"MemTotal: 1 kB\nMemAvailable: {available_bytes // 1024} kB\nSwapFree: 5 kB\n")
    write(root / "proc/self/cgroup", own_groups)
    return root


def add_v2_group(
    root: Path, path: str, *, limit: int | str, used: int, caches: int = 0, high: int | str = "max"
) -> None:
    group = root / "sys/fs/cgroup" / path
    write(group / "memory.max", f"{limit}\n")
    write(group / "memory.high", f"{high}\n")
    write(group / "memory.current", f"{used}\n")
    write(group / "memory.stat", f"anon {used}\ninactive_file {caches // 2}\nactive_file {caches - caches // 2}\n")


def add_v1_group(root: Path, path: str, *, limit: int, used: int, caches: int = 0) -> None:
    group = root / "sys/fs/cgroup/memory" / path
    write(group / "memory.limit_in_bytes", f"{limit}\n")
    write(group / "memory.usage_in_bytes", f"{used}\n")
    write(group / "memory.stat", f"inactive_file 7\ntotal_inactive_file {caches}\ntotal_active_file 0\n")


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_without_groups_the_kernels_estimate_counts(tmp_path: Path) -> None:
    assert available_memory_bytes(make_machine(tmp_path, available_bytes=8 * GIB, own_groups="0::/\n")) == 8 * GIB


def test_a_container_sees_its_limit_at_the_root(tmp_path: Path) -> None:
    root = make_machine(tmp_path, available_bytes=8 * GIB, own_groups="0::/\n")
    add_v2_group(root, "", limit=4 * GIB, used=GIB)
    assert available_memory_bytes(root) == 3 * GIB


def test_file_caches_in_the_group_count_as_free(tmp_path: Path) -> None:
    """The weights just read are such a cache."""
    root = make_machine(tmp_path, available_bytes=8 * GIB, own_groups="0::/\n")
    add_v2_group(root, "", limit=4 * GIB, used=3 * GIB, caches=2 * GIB)
    assert available_memory_bytes(root) == 3 * GIB


def test_of_nested_groups_the_tightest_counts(tmp_path: Path) -> None:
    root = make_machine(tmp_path, available_bytes=8 * GIB, own_groups="0::/user.slice/session.scope\n")
    add_v2_group(root, "user.slice", limit=3 * GIB, used=2 * GIB)
    add_v2_group(root, "user.slice/session.scope", limit="max", used=GIB)
    assert available_memory_bytes(root) == GIB
    add_v2_group(root, "user.slice/session.scope", limit="max", high=GIB + 5, used=GIB)
    assert available_memory_bytes(root) == 5


def test_a_path_of_the_host_leads_to_what_is_mounted_here(tmp_path: Path) -> None:
    root = make_machine(tmp_path, available_bytes=8 * GIB, own_groups="0::/docker/0123abcd\n")
    add_v2_group(root, "", limit=4 * GIB, used=GIB)
    assert available_memory_bytes(root) == 3 * GIB


def test_version_1_of_the_groups(tmp_path: Path) -> None:
    own = "9:name=systemd:/\n4:cpu,memory:/jobs/42\n0::/\n"
    root = make_machine(tmp_path, available_bytes=8 * GIB, own_groups=own)
    add_v1_group(root, "", limit=UNLIMITED_V1, used=6 * GIB)
    assert available_memory_bytes(root) == 8 * GIB
    add_v1_group(root, "jobs/42", limit=2 * GIB, used=GIB, caches=GIB // 2)
    assert available_memory_bytes(root) == 3 * GIB // 2


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    root = make_machine(tmp_path, available_bytes=8 * GIB, own_groups="0::/\n")
    add_v2_group(root, "", limit=GIB, used=2 * GIB)
    assert available_memory_bytes(root) == 0


def test_this_machine_has_some() -> None:
    assert 0 < available_memory_bytes() < 1 << 50
