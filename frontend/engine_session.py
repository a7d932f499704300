"""One socket to one engine, with what tells that the other side is gone."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Iterator, Sequence
from typing import TypeVar

import zmq
import zmq.asyncio

from ipc.codec import Buffer, encode
from ipc.curve import HANDSHAKE_FAILURES, FrontendKeys
from ipc.messages import FrontendMessage, Goodbye, SupplyFeature
from ipc.sequence import UNCOUNTED, Verdict, first_sequence, judge
from ipc.sockets import make_dealer

T = TypeVar("T")

_FLUSH_MS = 200


def _now(awaitable: Awaitable[T]) -> T:
    # With DONTWAIT zmq.asyncio returns a future that is done already. Going around its socket instead would swallow the
    # edge-triggered events its own receivers wait for.
    assert isinstance(awaitable, asyncio.Future)
    return awaitable.result()


class EngineSession:
    """One socket to one engine, from connecting to closing.

    `hello_sequence` is the number of the first message, `Hello`. `epoch` is 0 until the engine has answered it;
    `expected` is the number that its next message must have then.
    """

    def __init__(
        self, context: zmq.asyncio.Context, endpoint: str, name: str, *, keys: FrontendKeys | None, insecure: bool
    ) -> None:
        """Raises zmq.ZMQError (for instance when there are too many open files), and leaves nothing open then."""
        self.socket: zmq.asyncio.Socket = make_dealer(context, endpoint, name=name, keys=keys, insecure=insecure)
        try:
            self.monitor = self.socket.get_monitor_socket(
                zmq.EVENT_DISCONNECTED
                | zmq.EVENT_CLOSED
                | zmq.EVENT_CLOSE_FAILED
                | zmq.EVENT_CONNECT_RETRIED
                | HANDSHAKE_FAILURES
            )
            self.socket.connect(endpoint)
        except BaseException:
            self.socket.close(linger=0)
            raise
        self.epoch = 0
        self.expected = 0
        self.hello_sequence = self._next_sequence = first_sequence()
        self.last_heard_s = time.monotonic()

    def send(self, message: FrontendMessage) -> bool:
        """Hand `message` to the socket without waiting; False if its queue is full. Raises WireError."""
        sequence = UNCOUNTED if isinstance(message, Goodbye) else self._next_sequence
        return self._send_frames(encode(message, self.epoch, sequence), sequence)

    def send_large(self, message: SupplyFeature) -> zmq.MessageTracker | None:
        """As `send`; None if the queue is full. `done` of the result tells when the message has left."""
        header, *parts = encode(message, self.epoch, self._next_sequence)
        frames = [zmq.Frame(part, track=True) for part in parts]
        return zmq.MessageTracker(*frames) if self._send_frames([header, *frames], self._next_sequence) else None

    def _send_frames(self, frames: Sequence[Buffer | zmq.Frame], sequence: int) -> bool:
        try:
            _now(self.socket.send_multipart(frames, flags=zmq.DONTWAIT, copy=False))
        except zmq.Again:
            return False
        if sequence != UNCOUNTED:
            self._next_sequence += 1
        return True

    def judge(self, sequence: int) -> Verdict:
        """Whether the message with this number, just received, is to be taken; the one after it is expected then."""
        verdict = judge(sequence, self.expected)
        if verdict == "next":
            self.expected += 1
        return verdict

    def receive_waiting(self) -> Iterator[list[zmq.Frame]]:
        """What lies in the socket already."""
        with contextlib.suppress(zmq.Again):
            while True:
                yield _now(self.socket.recv_multipart(zmq.DONTWAIT, copy=False))

    def close(self, *, flush: bool) -> None:
        """`flush`: what was sent last may still leave."""
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close(linger=_FLUSH_MS if flush and self.epoch else 0)
