"""What a supervisor and its child processes agree on: how a child learns that it is an orphan, and one exit code.

The supervisor holds the write end of a pipe whose read end is the child's standard input. It never writes; when it
dies, however it dies, the kernel closes the pipe.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

logger = logging.getLogger(__name__)

SUPERVISED_ENV = "FOREWORD_SUPERVISED"
# EX_CONFIG of sysexits.h: starting again would fail in the same way.
STARTUP_FAILURE_EXIT_CODE = 78

_GRACE_S = 5.0


def exit_with_supervisor() -> None:
    """If a supervisor started this process: from now on, end with it (SIGTERM to ourselves, 5 s later for good)."""
    # Not for grandchildren: their standard input is another.
    if os.environ.pop(SUPERVISED_ENV, None) == "1":
        threading.Thread(target=_wait_for_end_of_stdin, name="supervisor-watch", daemon=True).start()


def _wait_for_end_of_stdin() -> None:
    while os.read(0, 1024):
        pass
    logger.warning("supervisor_gone exiting=1")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os._exit(1)
