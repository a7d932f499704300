"""What processes that serve have in common: how a child learns that it is an orphan, one exit code, open files.

The supervisor holds the write end of a pipe whose read end is the child's standard input. It never writes; when it
dies, however it dies, the kernel closes the pipe.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import resource
import signal
import sys
import threading
import time
from typing import NoReturn

from .endpoints import socket_path

logger = logging.getLogger(__name__)

SUPERVISED_ENV = "FOREWORD_SUPERVISED"
# EX_CONFIG of sysexits.h: starting again would fail in the same way.
STARTUP_FAILURE_EXIT_CODE = 78

_GRACE_S = 5.0
_ENOUGH_OPEN_FILES = 65_536


def exit_with_supervisor(endpoint: str | None = None) -> None:
    """If a supervisor started this process: from now on, end with it (SIGTERM to ourselves, 5 s later for good).

    `endpoint` is where this process listens, if it does: the orphan removes that socket, and its directory if
    nothing else is in there, as nobody is left who would.
    """
    # Not for grandchildren: their standard input is another.
    if os.environ.pop(SUPERVISED_ENV, None) == "1":
        threading.Thread(target=_wait_for_end_of_stdin, args=(endpoint,), name="supervisor-watch", daemon=True).start()


def raise_open_files_limit() -> None:
    """Every connection is an open file: allow this process 65,536, or as many as the hard limit has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        logger.info("open_files_limit_raised soft=%d was=%d hard=%d", wanted, soft, hard)


def spare_garbage_collector() -> None:
    """Nothing that exists now is garbage, nor looked at again: half a million objects of libraries and a model, which a
    full collection would go through in the middle of somebody's answer.
    """
    gc.collect()
    gc.freeze()
    # What is made from now on and lives long (the nodes of cached prefixes, hundreds of thousands) is in no circle.
    # Going through all of it takes tens of milliseconds, so that happens a hundred times more rarely than usual.
    gc.set_threshold(*gc.get_threshold()[:2], 1000)


def end_process(exit_code: int) -> NoReturn:
    """As `sys.exit`, called last in the main thread, but objects are left for the kernel to free.

    To take them apart takes a second or two; and where `spare_garbage_collector` keeps them from being taken apart,
    libtriton prints thirty lines about leaks.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _wait_for_end_of_stdin(endpoint: str | None) -> None:
    while os.read(0, 1024):
        pass
    logger.warning("supervisor_gone exiting=1")
    if endpoint is not None:
        # ValueError: it was no endpoint, as the main thread has said.
        with contextlib.suppress(OSError, ValueError):
            path = socket_path(endpoint)
            path.unlink(missing_ok=True)
            path.parent.rmdir()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os._exit(1)
