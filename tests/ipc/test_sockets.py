"""Only the user gets near an engine's socket, and a bad endpoint says what is wrong with it."""

from __future__ import annotations

import errno
import re
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from ipc.sockets import (
    bind_router,
    check_listenable,
    check_private,
    make_dealer,
    make_private_directory,
    peer_name,
    socket_path,
)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


def test_a_private_directory_is_new_and_ours_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    first, second = make_private_directory(), make_private_directory()
    assert first != second and first.parent == second.parent == tmp_path
    assert stat.S_IMODE(first.stat().st_mode) == 0o700
    check_private(first)


@pytest.mark.parametrize("mode", [0o701, 0o710, 0o755, 0o777])
def test_no_socket_is_bound_where_others_can_enter(
    tmp_path: Path, mode: int, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(PermissionError, match=f"mode 0{mode:o}"):
        bind_router(context, f"ipc://{tmp_path}/engine")
    assert list(tmp_path.iterdir()) == []
    tmp_path.chmod(0o700)
    bind_router(context, f"ipc://{tmp_path}/engine")
    assert (tmp_path / "engine").is_socket()


def test_the_place_of_a_living_engine_is_not_taken_but_that_of_a_dead_one_is(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    tmp_path.chmod(0o700)
    endpoint = f"ipc://{tmp_path}/engine"
    check_listenable(endpoint)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "engine"))
    check_listenable(endpoint)
    router = bind_router(context, endpoint)
    for listen in (check_listenable, lambda endpoint: bind_router(context, endpoint)):
        with pytest.raises(OSError, match="another engine does") as caught:
            listen(endpoint)
        assert caught.value.errno == errno.EADDRINUSE
    dealer = make_dealer(context, endpoint)
    dealer.connect(endpoint)
    dealer.send(b"hello")
    assert router.recv_multipart()[1:] == [b"hello"]


def test_a_link_to_a_private_directory_is_not_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(PermissionError, match="not a directory"):
        check_private(tmp_path / "link")


@pytest.mark.parametrize(
    ("endpoint", "complaint"),
    [
        ("udp://127.0.0.1:5555", "must start with ipc://"),
        ("/run/engine", "must start with ipc://"),
        ("ipc://@abstract", "absolute path"),
        ("ipc://*", "absolute path"),
        ("ipc://", "absolute path"),
        ("ipc:///a\0b", "absolute path"),
        ("ipc:///" + "x" * 107, "108 bytes, a socket's may have 107"),
    ],
)
def test_a_bad_endpoint_is_refused(endpoint: str, complaint: str, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    for use in (socket_path, lambda e: bind_router(context, e), lambda e: make_dealer(context, e)):
        with pytest.raises(ValueError, match=complaint):
            use(endpoint)


def test_the_longest_endpoint_works(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    directory = make_private_directory()
    endpoint = f"ipc://{directory}/".ljust(len("ipc://") + 107, "x")
    bind_router(context, endpoint)
    assert socket_path(endpoint).is_socket()


def test_a_full_or_missing_peer_raises_and_loses_nothing(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    tmp_path.chmod(0o700)
    endpoint = f"ipc://{tmp_path}/engine"
    router = bind_router(context, endpoint, queue_messages=5)
    dealer = make_dealer(context, endpoint, queue_messages=5)
    dealer.connect(endpoint)
    dealer.send(b"hello")
    identity, _ = router.recv_multipart()
    num_sent = fill(router, identity)
    assert 0 < num_sent < 10_000
    assert [int(dealer.recv_multipart()[0]) for _ in range(num_sent)] == list(range(num_sent))
    dealer.close(linger=0)
    for missing in (identity, b"nobody"):
        assert refusal(router, missing) == errno.EHOSTUNREACH


def test_a_peer_is_known_by_its_name(tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    tmp_path.chmod(0o700)
    endpoint = f"ipc://{tmp_path}/engine"
    router = bind_router(context, endpoint)
    dealers = [make_dealer(context, endpoint, name="http") for _ in range(2)]
    for dealer in dealers:
        dealer.connect(endpoint)
        dealer.send(b"hello")
    names = {peer_name(router.recv_multipart()[0]) for _ in dealers}
    # One name may be used by many at a time.
    assert len(names) == 2 and all(re.fullmatch("http-[0-9a-f]{8}", name) for name in names)
    # Whatever a stranger calls itself, it stays one field of one line.
    assert peer_name(b"\x00\xff") == "00ff"
    assert peer_name(b"a b\nc=d") == b"a b\nc=d".hex()


def fill(router: zmq.Socket[bytes], identity: bytes) -> int:
    """Number messages until no more fit."""
    payload = bytes(100_000)
    for num_sent in range(10_000):
        try:
            router.send_multipart([identity, b"%d" % num_sent, payload], zmq.DONTWAIT)
        except zmq.Again:
            return num_sent
    return 10_000


def refusal(router: zmq.Socket[bytes], identity: bytes) -> int | None:
    """The error that sending to `identity` ends with, once its disconnection had time to be noticed."""
    for _ in range(1000):
        try:
            router.send_multipart([identity, b"late"], zmq.DONTWAIT)
        except zmq.Again:
            pass
        except zmq.ZMQError as error:
            return error.errno
        router.poll(5)
    return None
