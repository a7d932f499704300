"""A process that serves many connections allows itself as many open files, and stops for no garbage collection."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from ipc.process import spare_garbage_collector

_RAISE = """
import logging, resource, sys
from ipc.process import raise_open_files_limit

soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
raise_open_files_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "said"),
    [
        (256, 2048, ["open_files_limit_raised soft=2048 was=256 hard=2048", "2048 2048"]),
        (2048, 2048, ["2048 2048"]),
    ],
)
def test_the_soft_limit_is_raised_to_the_hard_one(soft: int, hard: int, said: list[str]) -> None:
    argv = [sys.executable, "-c", _RAISE, str(soft), str(hard)]
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines() == said


def test_what_exists_is_no_longer_looked_at_by_the_garbage_collector() -> None:
    try:
        spare_garbage_collector()
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()


_END = """
import atexit
from ipc.process import end_process

class Kept:
    def __del__(self):
        print("taken apart")

kept = Kept()
atexit.register(print, "at exit")
print("printed")
end_process(3)
"""


def test_the_end_of_a_process_takes_nothing_apart_but_does_what_was_promised() -> None:
    result = subprocess.run([sys.executable, "-c", _END], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (3, "printed\nat exit\n", "")
