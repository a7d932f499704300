"""A place to listen, and frontends made of bare sockets, for tests of an engine behind a socket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tests.wire_peers import BareFrontend, Connect, private_endpoint


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return private_endpoint(tmp_path)


@pytest.fixture
def connect(endpoint: str) -> Iterator[Connect]:
    """Makes frontends that have yet to say hello."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield lambda **options: BareFrontend(context, endpoint, **options)
    context.destroy(linger=0)


@pytest.fixture
def join(connect: Connect) -> Connect:
    """Makes frontends that have a session."""

    def joined(**options: int) -> BareFrontend:
        frontend = connect(**options)
        frontend.hello()
        return frontend

    return joined
