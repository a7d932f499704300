"""The socket pair between frontends and an engine core: who may enter, and how much may queue up.

One ROUTER per engine, one DEALER per frontend, over `ipc://` in a directory only its owner can enter: whoever can
connect to an engine can make it compute. Options follow what was measured: a plain ROUTER drops silently when
a peer is slow, hence ROUTER_MANDATORY, which raises instead (EAGAIN when a peer's queue is full, EHOSTUNREACH
when it is gone).
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import tempfile
from pathlib import Path
from typing import TypeVar

import zmq

from .codec import DEFAULT_LIMITS

QUEUE_MESSAGES = 1024
_LINGER_MS = 1000
_NEVER_MS = 24 * 3600 * 1000
# sockaddr_un.sun_path has 108 bytes, the last of them 0.
_MAX_PATH_BYTES = 107
_PEER_NAME = re.compile(r"[A-Za-z0-9_.-]+")

SocketT = TypeVar("SocketT", bound=zmq.Socket)


def make_private_directory() -> Path:
    """A new directory that only the user can enter, for sockets: in XDG_RUNTIME_DIR if there is one."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    parent = runtime if runtime and os.access(runtime, os.W_OK | os.X_OK) else None
    # mkdtemp makes it with mode 0700.
    return Path(tempfile.mkdtemp(prefix="foreword-", dir=parent))


def socket_path(endpoint: str) -> Path:
    """The path an `ipc://` endpoint names.

    Raises:
        ValueError: not `ipc://`, not an absolute path (the abstract names `ipc://@…` have no owner), or longer than
            the 107 bytes a socket's name may have.
    """
    scheme, separator, path = endpoint.partition("://")
    if not separator or scheme != "ipc":
        raise ValueError(f"endpoint must start with ipc://, got {endpoint!r}")
    if not path.startswith("/") or "\0" in path:
        raise ValueError(f"endpoint must name an absolute path, got {endpoint!r}")
    num_bytes = len(os.fsencode(path))
    if num_bytes > _MAX_PATH_BYTES:
        raise ValueError(
            f"endpoint's path has {num_bytes} bytes, a socket's may have {_MAX_PATH_BYTES}: {path!r}"
            " (choose a shorter directory, for instance with TMPDIR)"
        )
    return Path(path)


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


def bind_router(context: zmq.Context[SocketT], endpoint: str, *, queue_messages: int = QUEUE_MESSAGES) -> SocketT:
    """A ROUTER bound to `endpoint`, a place left by a dead engine included.

    `queue_messages` bounds what waits for one peer in the socket. Raises ValueError (no such endpoint),
    PermissionError (others could enter), zmq.ZMQError (in use).
    """
    check_private(socket_path(endpoint).parent)
    router = _socket(context, zmq.ROUTER, queue_messages)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    try:
        router.bind(endpoint)
    except zmq.ZMQError:
        router.close(linger=0)
        raise
    return router


def make_dealer(
    context: zmq.Context[SocketT], endpoint: str, *, name: str = "frontend", queue_messages: int = QUEUE_MESSAGES
) -> SocketT:
    """A DEALER, yet to be connected to `endpoint` (which is checked: ValueError).

    It connects once (the next attempt would come a day later): what was queued for one engine must never reach
    the next. `name` is for the engine's log (`peer_name`); it need not be unique.
    """
    socket_path(endpoint)
    dealer = _socket(context, zmq.DEALER, queue_messages)
    # A ROUTER shuts its door to an identity it knows already; a name alone would return before its old socket is gone.
    dealer.setsockopt(zmq.ROUTING_ID, f"{name}-{secrets.token_hex(4)}".encode())
    # Not -1 (never): with that a disconnection also discards what was received and not yet read.
    dealer.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
    return dealer


def peer_name(identity: bytes) -> str:
    """A ROUTER's peer for the log: what `make_dealer` called it, or the bytes in hexadecimal if they are no name."""
    text = identity.decode("ascii", "replace")
    return text if _PEER_NAME.fullmatch(text) else identity.hex()


def _socket(context: zmq.Context[SocketT], kind: int, queue_messages: int) -> SocketT:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, queue_messages)
    socket.setsockopt(zmq.RCVHWM, queue_messages)
    # A hard ceiling in the transport; the codec's own limit gives the readable error.
    socket.setsockopt(zmq.MAXMSGSIZE, DEFAULT_LIMITS.max_frame_bytes + 1024)
    return socket
