"""The frontends that are connected, and what is on its way to them.

What a socket has no room for waits in a bounded backlog per frontend. When that is full the frontend's requests are
aborted, and after everything that waited it is told so: no token disappears without a word.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

import zmq

from ipc.messages import EngineMessage, EngineOutputs, Goodbye, Refused
from ipc.sockets import peer_name
from ipc.vocabulary import RequestError, RequestOutput

from .frontend_session import FrontendLostError, FrontendSession, send

logger = logging.getLogger(__name__)

# So many that each fits a message, whatever the ids: a frontend may have any number of requests.
ENTRIES_PER_MESSAGE = 1024


class FrontendSessions:
    """Every session by its peer's identity. Sending never waits, and may end sessions, then with all their requests.

    Args:
        router: sends to all of them; the caller's.
        epoch: the engine's, which every message bears.
        max_backlog_messages: most that wait for one frontend before its requests are aborted.
        max_merged_tokens: outputs of several steps that wait become one message of up to so many.
        abort_all: ends all requests of a session.
    """

    def __init__(
        self,
        router: zmq.Socket[bytes],
        epoch: int,
        max_backlog_messages: int,
        max_merged_tokens: int,
        abort_all: Callable[[FrontendSession], None],
    ) -> None:
        self._epoch = epoch
        self._router = router
        self._max_backlog_messages = max_backlog_messages
        self._max_merged_tokens = max_merged_tokens
        self._abort_all = abort_all
        self._by_identity: dict[bytes, FrontendSession] = {}

    def __iter__(self) -> Iterator[FrontendSession]:
        """Those there are now, whichever end meanwhile."""
        return iter(list(self._by_identity.values()))

    def get(self, identity: bytes) -> FrontendSession | None:
        return self._by_identity.get(identity)

    def is_live(self, frontend: FrontendSession) -> bool:
        """Whether this very session has not ended."""
        return self._by_identity.get(frontend.identity) is frontend

    def begin(self, identity: bytes, expected: int) -> FrontendSession:
        """With a peer that has no session; `expected` is the number that its next message must have."""
        frontend = self._by_identity[identity] = FrontendSession(identity, time.monotonic(), expected)
        logger.debug("frontend_joined frontend=%s", peer_name(identity))
        return frontend

    def begin_anew(self, frontend: FrontendSession, expected: int) -> None:
        """The frontend has no use for what it had in flight, nor for what waits for it."""
        self._abort_all(frontend)
        frontend.backlog.clear()
        frontend.last_heard_s = time.monotonic()
        frontend.expected = expected

    def forget(self, frontend: FrontendSession, reason: str) -> None:
        """Its session is over, and it knows or is gone."""
        if self._by_identity.pop(frontend.identity, None) is None:
            return
        logger.info(
            "frontend_left frontend=%s reason=%s dropped_requests=%d",
            peer_name(frontend.identity),
            reason,
            len(frontend.engine_ids),
        )
        self._abort_all(frontend)
        frontend.backlog.clear()

    def end(self, frontend: FrontendSession, reason: str) -> None:
        """Give the session up and say so: now if possible, else in answer to the frontend's next message."""
        self.forget(frontend, reason)
        self.tell(frontend.identity, Goodbye())

    def tell(self, identity: bytes, message: Goodbye | Refused) -> None:
        """Outside any session: to a peer that has none, or has none any more. If it is gone already, all the better."""
        with contextlib.suppress(FrontendLostError):
            send(self._router, identity, self._epoch, message)

    def enqueue(self, frontend: FrontendSession, message: EngineMessage) -> None:
        """Send it now if there is room and nothing waits, else keep it in the backlog, unless the session is over."""
        if not frontend.backlog and self.send(frontend, message):
            return
        if frontend.identity not in self._by_identity:
            return
        frontend.keep(message, self._max_merged_tokens)
        if self.is_full(frontend) and frontend.engine_ids:
            self._abort_unread(frontend)
        elif len(frontend.backlog) > 2 * self._max_backlog_messages:
            # It sends and sends, and reads nothing: not even refusals can be kept for it.
            self.end(frontend, "overflow")

    def send(self, frontend: FrontendSession, message: EngineMessage) -> bool:
        """False if its queue is full, or if it is lost: then it has been forgotten."""
        try:
            return frontend.send(self._router, self._epoch, message)
        except FrontendLostError as error:
            if error.reason == "disconnected":
                self.forget(frontend, error.reason)
            else:
                logger.error("message_unsendable frontend=%s reason=%.200r", peer_name(frontend.identity), error.detail)
                self.end(frontend, error.reason)
            return False

    def send_backlogs(self) -> None:
        """As far as there is room."""
        for frontend in self:
            while frontend.backlog and self.send(frontend, frontend.backlog[0]):
                frontend.backlog.popleft()

    def has_backlog(self) -> bool:
        return any(frontend.backlog for frontend in self._by_identity.values())

    def is_full(self, frontend: FrontendSession) -> bool:
        """Whether so much waits for it that it is to have no requests; `not_reading` is what they end with."""
        return len(frontend.backlog) >= self._max_backlog_messages

    def not_reading(self) -> RequestError:
        return RequestError(
            "overloaded",
            f"the frontend did not read its outputs: {self._max_backlog_messages} messages were waiting for it",
        )

    def _abort_unread(self, frontend: FrontendSession) -> None:
        own_ids, error = list(frontend.engine_ids), self.not_reading()
        logger.warning("frontend_overflow frontend=%s aborted=%d", peer_name(frontend.identity), len(own_ids))
        self._abort_all(frontend)
        outputs = [RequestOutput(own_id, [], finish_reason="abort", error=error) for own_id in own_ids]
        for start in range(0, len(outputs), ENTRIES_PER_MESSAGE):
            frontend.keep(EngineOutputs(outputs[start : start + ENTRIES_PER_MESSAGE]), 0)
