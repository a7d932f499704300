"""The socket pair between frontends and an engine core: who may enter, and how much may queue up.

One ROUTER per engine, one DEALER per frontend, over `ipc://` in a directory only its owner can enter, or over `tcp://`
with keys: whoever can connect to an engine can make it compute. Options follow what was measured: a plain ROUTER drops
silently when a peer is slow, hence ROUTER_MANDATORY, which raises instead (EAGAIN when a peer's queue is full,
EHOSTUNREACH when it is gone).
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import socket
import stat
import tempfile
from pathlib import Path
from typing import TypeVar

import zmq

from .codec import DEFAULT_LIMITS
from .curve import EngineKeys, FrontendKeys, check_security, secure_dealer, secure_router
from .endpoints import check_endpoint, is_tcp, socket_path, tcp_address

QUEUE_MESSAGES = 1024
_LINGER_MS = 1000
_NEVER_MS = 24 * 3600 * 1000
_PEER_NAME = re.compile(r"[A-Za-z0-9_.-]+")

SocketT = TypeVar("SocketT", bound=zmq.Socket)


def make_private_directory() -> Path:
    """A new directory that only the user can enter, for sockets: in XDG_RUNTIME_DIR if there is one."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    parent = runtime if runtime and os.access(runtime, os.W_OK | os.X_OK) else None
    # mkdtemp makes it with mode 0700.
    return Path(tempfile.mkdtemp(prefix="foreword-", dir=parent))


def check_private(directory: Path) -> None:
    """Raises PermissionError unless `directory` is a real directory of ours that nobody else can enter."""
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise PermissionError(f"{directory} is not a directory")
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{directory} belongs to uid {status.st_uid}, not to us (uid {os.geteuid()})")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise PermissionError(f"{directory} has mode {mode:04o}: others can enter it; it must be 0700")


def check_listenable(endpoint: str, *, keys: EngineKeys | None = None, insecure: bool = False) -> None:
    """Find out whether an engine may and can listen at `endpoint`, without listening.

    Raises ValueError (no such endpoint, or not protected), OSError: others could enter (PermissionError), or the
    address is in use or not this machine's.
    """
    check_endpoint(endpoint)
    check_security(endpoint, has_keys=keys is not None, insecure=insecure)
    if not is_tcp(endpoint):
        _check_free(socket_path(endpoint))
        return
    address = tcp_address(endpoint)
    host = "" if address.host == "*" else address.host
    family = socket.AF_INET6 if address.is_ipv6 else socket.AF_INET
    try:
        socket.create_server((host, address.port), family=family).close()
    except OSError as error:
        raise OSError(error.errno, f"cannot listen at {endpoint}: {error.strerror or error}") from error


def _check_free(path: Path) -> None:
    """Raises PermissionError if others can enter the directory, OSError if somebody listens at `path`."""
    check_private(path.parent)
    # ZeroMQ takes the place of an engine that listens there; nobody would find it any more, and it would not know.
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return
        except BlockingIOError:
            pass  # there is one, with more callers than it has come to yet
    raise OSError(errno.EADDRINUSE, f"cannot listen at ipc://{path}: another engine does")


def bind_router(
    context: zmq.Context[SocketT],
    endpoint: str,
    *,
    keys: EngineKeys | None = None,
    insecure: bool = False,
    queue_messages: int = QUEUE_MESSAGES,
) -> SocketT:
    """A ROUTER bound to `endpoint`, a place left by a dead engine included.

    With `keys`, the context must have an `ipc.curve.Authorizer` already. `queue_messages` bounds what waits for one
    peer in the socket. Raises what `check_listenable` raises, and zmq.ZMQError (in use).
    """
    check_endpoint(endpoint)
    check_security(endpoint, has_keys=keys is not None, insecure=insecure)
    if not is_tcp(endpoint):
        _check_free(socket_path(endpoint))
    router = _socket(context, zmq.ROUTER, endpoint, queue_messages)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    try:
        if keys is not None:
            secure_router(router, keys)
        router.bind(endpoint)
    except zmq.ZMQError:
        router.close(linger=0)
        raise
    return router


def make_dealer(
    context: zmq.Context[SocketT],
    endpoint: str,
    *,
    name: str = "frontend",
    keys: FrontendKeys | None = None,
    insecure: bool = False,
    queue_messages: int = QUEUE_MESSAGES,
) -> SocketT:
    """A DEALER, yet to be connected to `endpoint` (which is checked: ValueError, also where it is not protected).

    It connects once (the next attempt would come a day later): what was queued for one engine must never reach
    the next. `name` is for the engine's log (`peer_name`); it need not be unique.
    """
    check_endpoint(endpoint)
    check_security(endpoint, has_keys=keys is not None, insecure=insecure)
    dealer = _socket(context, zmq.DEALER, endpoint, queue_messages)
    # A ROUTER shuts its door to an identity it knows already; a name alone would return before its old socket is gone.
    dealer.setsockopt(zmq.ROUTING_ID, f"{name}-{secrets.token_hex(4)}".encode())
    # Not -1 (never): with that a disconnection also discards what was received and not yet read.
    dealer.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
    if keys is not None:
        secure_dealer(dealer, keys)
    return dealer


def peer_name(identity: bytes) -> str:
    """A ROUTER's peer for the log: what `make_dealer` called it, or the bytes in hexadecimal if they are no name."""
    text = identity.decode("ascii", "replace")
    return text if _PEER_NAME.fullmatch(text) else identity.hex()


def _socket(context: zmq.Context[SocketT], kind: int, endpoint: str, queue_messages: int) -> SocketT:
    made = context.socket(kind)
    made.setsockopt(zmq.LINGER, _LINGER_MS)
    made.setsockopt(zmq.SNDHWM, queue_messages)
    made.setsockopt(zmq.RCVHWM, queue_messages)
    # A hard ceiling in the transport; the codec's own limit gives the readable error.
    made.setsockopt(zmq.MAXMSGSIZE, DEFAULT_LIMITS.max_frame_bytes + 1024)
    if is_tcp(endpoint):
        made.setsockopt(zmq.IPV6, int(tcp_address(endpoint).is_ipv6))
    return made
