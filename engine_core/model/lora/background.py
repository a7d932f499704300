"""Work that steps go on beside, and shall hardly notice."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import TypeVar

Result = TypeVar("Result")

# A step's threads wait for one another many times, so it takes as long as whoever shares a core. With this the system
# gives a tenth of a core that somebody else wants.
_NICENESS = 10
# A step asks for the interpreter's lock many times, and waits as long each time somebody has it. By default, 5 ms.
_SWITCH_INTERVAL_S = 0.0005
# Several at once would take more from steps, and be done no sooner.
_ONE_AT_A_TIME = threading.Lock()


def in_background(compute: Callable[[], Result]) -> Result:
    """What `compute` returns or raises, computed by a thread that comes last where the system can have such.

    A thread of its own: who has stepped back may not come forward again.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            _step_back()
            with _ONE_AT_A_TIME, _lock_given_up_soon():
                result = compute()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    thread = threading.Thread(target=run, name="adapter-reading", daemon=True)
    thread.start()
    return future.result()


@contextmanager
def _lock_given_up_soon() -> Iterator[None]:
    """Within it, by all threads: the interval is the process's."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(min(before_s, _SWITCH_INTERVAL_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)


def _step_back() -> None:
    # There it is this thread's, elsewhere all threads of a process have one.
    if sys.platform == "linux":
        # A sandbox may not allow it, and it is only a courtesy.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, min(19, os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS))
