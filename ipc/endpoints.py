"""Where an engine listens: `ipc://` and a path on this machine, or `tcp://` and an address."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

# sockaddr_un.sun_path has 108 bytes, the last of them 0.
_MAX_PATH_BYTES = 107
_TCP = re.compile(r"(?:\[(?P<ipv6>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[\w.*-]+)):(?P<port>\d{1,5})")
_LOOPBACK = {"*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


class TcpAddress(NamedTuple):
    """`host` is a name or an address, without the brackets of IPv6; `*` is every IPv4 address of this machine."""

    host: str
    port: int

    @property
    def is_ipv6(self) -> bool:
        return ":" in self.host


def is_tcp(endpoint: str) -> bool:
    return endpoint.startswith("tcp://")


def check_endpoint(endpoint: str) -> None:
    """Raises ValueError unless `endpoint` is one an engine can listen at."""
    if is_tcp(endpoint):
        tcp_address(endpoint)
    elif endpoint.startswith("ipc://"):
        socket_path(endpoint)
    else:
        raise ValueError(f"endpoint must start with ipc:// or tcp://, got {endpoint!r}")


def tcp_address(endpoint: str) -> TcpAddress:
    """The address a `tcp://host:port` endpoint names. Raises ValueError: it is none, or its port is not 1 … 65535."""
    match = _TCP.fullmatch(endpoint.removeprefix("tcp://"))
    if not is_tcp(endpoint) or match is None:
        raise ValueError(f"endpoint must be tcp://host:port or tcp://[ipv6]:port, got {endpoint!r}")
    port = int(match["port"])
    if not 1 <= port <= 65535:
        raise ValueError(f"endpoint's port must be in 1 … 65535, got {endpoint!r}")
    return TcpAddress(match["ipv6"] or match["host"], port)


def local_endpoint(endpoint: str) -> str:
    """Where a process on the same machine finds an engine that listens at `endpoint`, which may be a wildcard."""
    if not is_tcp(endpoint):
        return endpoint
    host, port = tcp_address(endpoint)
    host = _LOOPBACK.get(host, host)
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


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
