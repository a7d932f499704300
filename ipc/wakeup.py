"""How other threads, and signal handlers, wake a thread that polls sockets."""

from __future__ import annotations

import contextlib
import socket


class Wakeup:
    """To be polled for reading at `fileno()`; then `clear` it."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def fileno(self) -> int:
        return self._read.fileno()

    def wake(self) -> None:
        """Never waits; from any thread or signal handler, any time."""
        # Full, it holds enough wake-ups; closed, there is nobody to wake, though a signal may still ask for it.
        with contextlib.suppress(OSError):
            self._write.send(b"\0")

    def clear(self) -> None:
        """Forget all that came so far; something has."""
        self._read.recv(65536)

    def close(self) -> None:
        self._read.close()
        self._write.close()
