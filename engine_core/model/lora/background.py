"""Work that steps go on beside, and shall hardly notice."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

Result = TypeVar("Result")

# A step's threads wait for one another many times, so it takes as long as whoever shares a core. With this the system
# gives a tenth of a core that somebody else wants.
_NICENESS = 10


def in_background(compute: Callable[[], Result]) -> Result:
    """What `compute` returns or raises, computed by a thread that comes last where the system can have such.

    A thread of its own: who has stepped back may not come forward again.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            _step_back()
            future.set_result(compute())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name="adapter-reading", daemon=True)
    thread.start()
    return future.result()


def _step_back() -> None:
    # There it is this thread's, elsewhere all threads of a process have one.
    if sys.platform == "linux":
        # A sandbox may not allow it, and it is only a courtesy.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, min(19, os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS))
