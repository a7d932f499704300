"""The replay socket: what consumers have missed, and whole tables (`ipc.kv_events.requests`).

An answer goes out as fast as its reader takes it, a part at a time; nobody waits for it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import zmq

from ipc.drops import DropCounter
from ipc.kv_events import END_OF_ANSWER, ReplayRequest, SnapshotEnd, SnapshotRequest, read_request
from ipc.kv_events.requests import encode_number

logger = logging.getLogger(__name__)

_MAX_CLIENTS = 64
_MAX_REQUESTS = 4
_MESSAGES_PER_TURN = 64
_REQUESTS_PER_TURN = 64

Frames = list[bytes]


@dataclass(slots=True)
class _Client:
    """Who asked: what of the present answer is to be sent next, and what else was asked meanwhile."""

    frames: Iterator[Frames] | None = None
    unsent: Frames | None = None
    requests: deque[ReplayRequest | SnapshotRequest] = field(default_factory=deque)
    wants_snapshot: bool = False


class Answers:
    """Answers what comes in at `router`, which has ROUTER_MANDATORY set.

    Args:
        topic: of the batches.
        epoch: 8 bytes.
        buffer: the batches that can be replayed, in order; the publisher's.

    Attributes:
        router: the socket.
        drops: requests that were not answered, by reason.
    """

    def __init__(self, router: zmq.Socket[bytes], topic: bytes, epoch: bytes, buffer: deque[tuple[int, bytes]]) -> None:
        self.drops = DropCounter("kv_events")
        self.router = router
        self._topic = topic
        self._epoch = epoch
        self._buffer = buffer
        self._clients: dict[bytes, _Client] = {}

    @property
    def want_snapshot(self) -> bool:
        """Whether somebody waits for one."""
        return any(client.wants_snapshot for client in self._clients.values())

    @property
    def is_busy(self) -> bool:
        """Whether there is something to be sent."""
        return any(client.frames is not None for client in self._clients.values())

    def receive(self) -> None:
        for _ in range(_REQUESTS_PER_TURN):
            try:
                identity, *frames = self.router.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            request = read_request(frames[1]) if len(frames) == 2 and not frames[0] else None
            if request is None:
                self.drops.add("unreadable_request", f"{len(frames)} frames")
                continue
            self._add(identity, request)

    def _add(self, identity: bytes, request: ReplayRequest | SnapshotRequest) -> None:
        client = self._clients.get(identity)
        if client is None:
            if len(self._clients) == _MAX_CLIENTS:
                self.drops.add("too_many_requests", f"{_MAX_CLIENTS} clients have unanswered ones")
                return
            client = self._clients[identity] = _Client()
        if len(client.requests) == _MAX_REQUESTS:
            self.drops.add("too_many_requests", f"a client has {_MAX_REQUESTS} unanswered ones")
            return
        client.requests.append(request)
        self._begin_next(identity, client)

    def _begin_next(self, identity: bytes, client: _Client) -> None:
        if client.frames is not None or client.wants_snapshot:
            return
        if not client.requests:
            del self._clients[identity]
            return
        request = client.requests.popleft()
        if isinstance(request, SnapshotRequest):
            client.wants_snapshot = True
        else:
            client.frames = self._replay(request)

    def _replay(self, request: ReplayRequest) -> Iterator[Frames]:
        end = self._end(b"" if request.epoch is None else self._epoch)
        if request.epoch is not None and request.epoch != self._epoch:
            return iter([end])
        # As of now: what is published later comes by itself.
        batches = [batch for batch in self._buffer if batch[0] >= request.first_sequence]
        return itertools.chain((self._message(*batch) for batch in batches), [end])

    def answer_with(self, snapshot: Iterable[bytes], next_sequence: int) -> None:
        """Here is what those who want a snapshot get: its batches, which may be read several times."""
        end = self._end(SnapshotEnd(self._epoch, next_sequence).encode())
        for client in self._clients.values():
            if client.wants_snapshot:
                client.wants_snapshot = False
                messages = (self._message(next_sequence, payload) for payload in snapshot)
                client.frames = itertools.chain(messages, [end])

    def _message(self, sequence: int, payload: bytes) -> Frames:
        return [b"", self._topic, encode_number(sequence), payload]

    def _end(self, more: bytes) -> Frames:
        return [b"", b"", END_OF_ANSWER, more]

    def send(self) -> bool:
        """A part of each answer, as much as its reader takes. Returns whether somebody could have got more."""
        found_room = False
        for identity, client in list(self._clients.items()):
            if client.frames is None:
                continue
            try:
                found_room |= self._send_some(identity, client)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                del self._clients[identity]
                continue
            if client.frames is None:
                self._begin_next(identity, client)
        return found_room

    def _send_some(self, identity: bytes, client: _Client) -> bool:
        assert client.frames is not None
        for _ in range(_MESSAGES_PER_TURN):
            frames = client.unsent or next(client.frames, None)
            if frames is None:
                client.frames = None
                return False
            client.unsent = frames
            try:
                self.router.send_multipart([identity, *frames], zmq.DONTWAIT)
            except zmq.Again:
                return False
            client.unsent = None
        return True


class SharedBatches(Iterable[bytes]):
    """Batches that are encoded when the first reader comes to them, and only once."""

    def __init__(self, batches: Iterator[bytes]) -> None:
        self._batches = batches
        self._encoded: list[bytes] = []

    def __iter__(self) -> Iterator[bytes]:
        for index in itertools.count():
            if index == len(self._encoded):
                with contextlib.suppress(StopIteration):
                    self._encoded.append(next(self._batches))
            if index == len(self._encoded):
                return
            yield self._encoded[index]
