"""A proxy between frontends and an engine that can do to any message what a bad network or a bad program would."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import zmq

from ipc.sockets import bind_router

Direction = Literal["to_engine", "to_frontend"]
Frames = list[bytes]
# What arrives instead of one message: none, one or several.
Meddle = Callable[[Direction, Frames], list[Frames]]

_POLL_MS = 20


class MeddlingProxy:
    """`meddle` may be exchanged at any time. `num_changed` counts the messages that arrived otherwise than sent."""

    def __init__(self, endpoint: str, engine_endpoint: str) -> None:
        self.meddle: Meddle | None = None
        self.num_changed: Counter[Direction] = Counter()
        self._engine_endpoint = engine_endpoint
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = bind_router(self._context, endpoint)
        self._dealers: dict[bytes, zmq.Socket[bytes]] = {}
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._stopping:
            for socket, _ in self._poller.poll(_POLL_MS):
                if socket is self._router:
                    identity, *frames = self._router.recv_multipart()
                    for message in self._arriving("to_engine", frames):
                        self._dealer(identity).send_multipart(message)
                    continue
                identity = next(name for name, dealer in self._dealers.items() if dealer is socket)
                for message in self._arriving("to_frontend", socket.recv_multipart()):
                    try:
                        self._router.send_multipart([identity, *message])
                    except zmq.ZMQError:
                        # That session is over.
                        self._close(identity)
                        break

    def _arriving(self, direction: Direction, frames: Frames) -> list[Frames]:
        if self.meddle is None:
            return [frames]
        arriving = self.meddle(direction, frames)
        self.num_changed[direction] += arriving != [frames]
        return arriving

    def _dealer(self, identity: bytes) -> zmq.Socket[bytes]:
        if (dealer := self._dealers.get(identity)) is None:
            dealer = self._dealers[identity] = self._context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.ROUTING_ID, identity)
            dealer.connect(self._engine_endpoint)
            self._poller.register(dealer, zmq.POLLIN)
        return dealer

    def _close(self, identity: bytes) -> None:
        dealer = self._dealers.pop(identity)
        self._poller.unregister(dealer)
        dealer.close(linger=0)


@contextmanager
def meddling_proxy(endpoint: str, engine_endpoint: str) -> Iterator[MeddlingProxy]:
    proxy = MeddlingProxy(endpoint, engine_endpoint)
    try:
        yield proxy
    finally:
        proxy.stop()
