"""Who may talk to an engine over TCP: sockets that use CURVE, and the check of a peer's key (ZAP, ZeroMQ's RFC 27)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from .drops import DropCounter
from .endpoints import is_tcp
from .key_files import KeyFileError, KeyPair, load_public_keys

logger = logging.getLogger(__name__)

# The protocol prescribes the name.
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


@dataclass(frozen=True, slots=True)
class EngineKeys:
    """`authorized`: a file of public keys, or a directory of such files (`*.pub`), of who may connect."""

    own: KeyPair
    authorized: Path

    def as_frontend(self) -> FrontendKeys:
        """What the engine's own supervisor, which has its secret key, connects with."""
        return FrontendKeys(self.own, self.own.public)


@dataclass(frozen=True, slots=True)
class FrontendKeys:
    """`engine` is the public key of the engine to talk to: no other can answer in its place."""

    own: KeyPair
    engine: bytes


def check_security(endpoint: str, *, has_keys: bool, insecure: bool) -> None:
    """Raises ValueError unless `endpoint` is protected as it must be.

    What goes over `tcp://` can be read, changed and sent by anybody in between, so it takes keys or the word
    `insecure`. An `ipc://` socket is protected by its directory and takes none.
    """
    if not is_tcp(endpoint):
        if has_keys:
            raise ValueError(f"keys are for tcp:// endpoints; {endpoint} is protected by its directory")
    elif has_keys and insecure:
        raise ValueError(f"{endpoint}: either keys or --insecure, not both")
    elif not has_keys and not insecure:
        raise ValueError(
            f"{endpoint}: over tcp:// anybody could use the engine; give keys (`foreword keys` makes some), or"
            " --insecure if the network is nobody else's"
        )


def secure_router(router: zmq.Socket[Any], keys: EngineKeys) -> None:
    """Before `router` is bound: only peers that an `Authorizer` of its context lets in can send anything."""
    router.curve_server = 1
    router.curve_secretkey = keys.own.secret
    router.curve_publickey = keys.own.public
    # Without a domain the library asks nobody whether a key is known.
    router.setsockopt(zmq.ZAP_DOMAIN, b"foreword")


def secure_dealer(dealer: zmq.Socket[Any], keys: FrontendKeys) -> None:
    """Before `dealer` is connected: it talks to the engine that has the key it expects, and to no other."""
    dealer.curve_secretkey = keys.own.secret
    dealer.curve_publickey = keys.own.public
    dealer.curve_serverkey = keys.engine


class Authorizer:
    """Answers the library's question whether a peer's key is known. One thread; make it before the router is bound.

    Keys are read again for each connection: a frontend is added or shut out without a restart. The engine's own
    key is always known.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: EngineKeys, drops: DropCounter) -> None:
        """`drops` counts those who are not let in, as `not_authorized`.

        Raises KeyFileError if the authorized keys cannot be read.
        """
        load_public_keys(keys.authorized)
        self._keys = keys
        self._drops = drops
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP_ENDPOINT)

    def answer(self) -> None:
        """Answer the questions that have arrived. Never waits."""
        while self.socket.poll(0):
            _, request_id, _, address, _, mechanism, *credentials = self.socket.recv_multipart()
            key = z85.encode(credentials[0]) if mechanism == b"CURVE" and credentials else b""
            known = self._is_known(key)
            if not known:
                self._drops.add("not_authorized", f"{address.decode()} with the key {key.decode()}")
            status, text = (b"200", b"") if known else (b"400", b"unknown key")
            self.socket.send_multipart([_ZAP_VERSION, request_id, status, text, b"", b""])

    def _is_known(self, key: bytes) -> bool:
        if key == self._keys.own.public:
            return True
        try:
            return key in load_public_keys(self._keys.authorized)
        except KeyFileError as error:
            logger.error("authorized_keys_unreadable reason=%r", str(error))
            return False


def why_no_handshake(event: Mapping[str, Any], endpoint: str, *, has_keys: bool) -> str | None:
    """What a socket monitor's event says about a peer that does not want us; None if it says nothing of the kind."""
    if not is_tcp(endpoint) or not event["event"] & HANDSHAKE_FAILURES:
        return None
    if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "not authorised: the engine does not know this frontend's key"
    # How a peer that expects something else hangs up is a matter of milliseconds, and so is the event.
    if not has_keys:
        return "not authorised: it seems that the engine wants keys"
    return "not authorised: the engine does not have the key that is expected of it"
