"""What arrives at a ZMQ socket, handed on by the event loop itself: no task wakes up for it, no future is made.

With `zmq.asyncio` that was half of what a token cost this process when it came alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import NoReturn

import zmq

# A flood must not keep the event loop from its other work.
_MESSAGES_PER_TURN = 64

# The frames of one message
Take = Callable[[list[memoryview]], None]


class SocketReader:
    """Reads `socket`, which is read by nobody else. For one event loop."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._take: Take | None = None
        self._failed: asyncio.Future[NoReturn] | None = None

    async def run(self, take: Take) -> NoReturn:
        """Hand every message to `take`, which must not wait, until it raises; raises the same."""
        fd = self._socket.FD
        self._take = take
        self._failed = self._loop.create_future()
        self._loop.add_reader(fd, self._read)
        self._read()
        try:
            await self._failed
        finally:
            self._take = None
            self._loop.remove_reader(fd)

    def look(self) -> None:
        """To be called whenever something was sent: that may have swallowed the sign that something has arrived."""
        self._loop.call_soon(self._read)

    def waiting(self) -> Iterator[list[memoryview]]:
        """What has arrived."""
        while True:
            try:
                frame = self._socket.recv(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            frames = [frame.buffer]
            while frame.more:
                frame = self._socket.recv(zmq.DONTWAIT, copy=False)
                frames.append(frame.buffer)
            yield frames

    def _read(self) -> None:
        if self._take is None or self._failed is None:
            return
        try:
            for number, frames in enumerate(self.waiting(), start=1):
                self._take(frames)
                if number == _MESSAGES_PER_TURN:
                    self.look()
                    return
        except Exception as error:
            self._take = None
            if not self._failed.done():
                self._failed.set_exception(error)
