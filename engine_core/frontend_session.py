"""One frontend's session as the engine sees it: what is in flight, what waits, and the numbers of its messages."""

from __future__ import annotations

import errno
from collections import deque
from dataclasses import dataclass, field

import zmq

from ipc.codec import WireError, encode
from ipc.messages import EngineMessage
from ipc.sequence import UNCOUNTED, Verdict, judge


class FrontendLostError(Exception):
    """It is `disconnected`, or cannot be told what it must be told (`unsendable_message`; `detail` says why)."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.detail = detail


@dataclass(slots=True, eq=False)
class FrontendSession:
    """`engine_ids` has its unfinished requests: its own id → the engine's.

    `backlog` is what its socket had no room for, `expected` the number that its next message must have.
    """

    identity: bytes
    last_heard_s: float
    expected: int
    engine_ids: dict[str, str] = field(default_factory=dict)
    backlog: deque[EngineMessage] = field(default_factory=deque)
    _next_sequence: int = 1

    def judge(self, sequence: int) -> Verdict:
        """Whether the message with this number, just received, is to be taken; the one after it is expected then."""
        verdict = judge(sequence, self.expected)
        if verdict == "next":
            self.expected += 1
        return verdict

    def send(self, router: zmq.Socket[bytes], epoch: int, message: EngineMessage) -> bool:
        """Send `message` with the session's next number, which an attempt without success leaves to the next.

        False if there is no room. Raises FrontendLostError.
        """
        sent = send(router, self.identity, epoch, message, self._next_sequence)
        if sent:
            self._next_sequence += 1
        return sent


def send(
    router: zmq.Socket[bytes], identity: bytes, epoch: int, message: EngineMessage, sequence: int = UNCOUNTED
) -> bool:
    """Hand `message` to the socket without waiting; False if the peer's queue is full. Raises FrontendLostError."""
    try:
        router.send_multipart([identity, *encode(message, epoch, sequence)], zmq.DONTWAIT, copy=False)
    except zmq.Again:
        return False
    except zmq.ZMQError as error:
        if error.errno != errno.EHOSTUNREACH:
            raise
        raise FrontendLostError("disconnected") from error
    except WireError as error:
        raise FrontendLostError("unsendable_message", str(error)) from error
    return True
