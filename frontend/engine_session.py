"""One socket to one engine, with what tells that the other side is gone."""

from __future__ import annotations

import time
from collections.abc import Sequence

import zmq

from ipc.codec import Buffer, encode
from ipc.curve import HANDSHAKE_FAILURES, FrontendKeys
from ipc.messages import FrontendMessage, Goodbye, SupplyFeature
from ipc.sequence import UNCOUNTED, Verdict, first_sequence, judge
from ipc.sockets import make_dealer

from .socket_reader import SocketReader

_FLUSH_MS = 200


class EngineSession:
    """One socket to one engine, from connecting to closing.

    `hello_sequence` is the number of the first message, `Hello`. `epoch` is 0 until the engine has answered it;
    `expected` is the number that its next message must have then. `reader` hands on what the engine sends,
    `monitor_reader` what ZMQ says of the connection.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        name: str,
        *,
        keys: FrontendKeys | None,
        insecure: bool,
    ) -> None:
        """Raises zmq.ZMQError (for instance when there are too many open files), and leaves nothing open then."""
        self._socket = make_dealer(context, endpoint, name=name, keys=keys, insecure=insecure)
        try:
            self._monitor = self._socket.get_monitor_socket(
                zmq.EVENT_DISCONNECTED
                | zmq.EVENT_CLOSED
                | zmq.EVENT_CLOSE_FAILED
                | zmq.EVENT_CONNECT_RETRIED
                | HANDSHAKE_FAILURES
            )
            self._socket.connect(endpoint)
        except BaseException:
            self._socket.close(linger=0)
            raise
        self.reader = SocketReader(self._socket)
        self.monitor_reader = SocketReader(self._monitor)
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
            self._socket.send_multipart(frames, flags=zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return False
        finally:
            self.reader.look()
        if sequence != UNCOUNTED:
            self._next_sequence += 1
        return True

    def judge(self, sequence: int) -> Verdict:
        """Whether the message with this number, just received, is to be taken; the one after it is expected then."""
        verdict = judge(sequence, self.expected)
        if verdict == "next":
            self.expected += 1
        return verdict

    def close(self, *, flush: bool) -> None:
        """`flush`: what was sent last may still leave."""
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close(linger=_FLUSH_MS if flush and self.epoch else 0)
