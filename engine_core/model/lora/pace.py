"""Long work in pieces, beside steps that shall hardly notice.

A step's threads wait for one another many times, and for the interpreter's lock, so it is held up by whatever shares
their cores. A lower priority makes that worse: who has the lock and no core keeps all others waiting. So a piece of
work is short, and followed by a pause in which steps have the machine for themselves.
"""

from __future__ import annotations

import threading
import time

# Steps keep six sevenths of a core.
_PAUSE_OF_WORK = 6
# A shorter pause is mostly the effort to fall asleep and wake up.
_SHORTEST_PAUSE_S = 0.001
# What could not be done in smaller pieces is no reason to wait for long.
_LONGEST_PAUSE_S = 0.05
# Who computes steps prepares the next one meanwhile, or waits for a device.
_STEPS_GO_ON_FOR_S = 1.0


class Pace:
    """One thread computes steps, others do work that can wait. Any thread may call anything."""

    def __init__(self) -> None:
        self._last_step_s = float("-inf")
        self._steps_thread = 0

    def step_begins(self) -> None:
        """In this thread."""
        self._last_step_s, self._steps_thread = time.monotonic(), threading.get_ident()

    @property
    def steps_go_on(self) -> bool:
        """In another thread than this."""
        is_recent = time.monotonic() - self._last_step_s < _STEPS_GO_ON_FOR_S
        return is_recent and self._steps_thread != threading.get_ident()


class Work:
    """What one thread does from now on, in pieces. Where no steps go on, it pauses not at all."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._paused_at_s = time.thread_time()

    def pause(self) -> None:
        """A piece is done: sleep in proportion to the processor's time it has taken."""
        pause_s = _PAUSE_OF_WORK * (time.thread_time() - self._paused_at_s)
        if pause_s < _SHORTEST_PAUSE_S:
            return
        if self._pace.steps_go_on:
            time.sleep(min(pause_s, _LONGEST_PAUSE_S))
        self._paused_at_s = time.thread_time()
