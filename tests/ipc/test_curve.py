"""Over TCP an engine hears only those whose keys it knows, and a frontend only the engine it expects."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from ipc.curve import HANDSHAKE_FAILURES, Authorizer, EngineKeys, FrontendKeys, why_no_handshake
from ipc.drops import DropCounter
from ipc.key_files import KeyFileError, load_key_pair, load_public_key, write_key_set
from ipc.sockets import bind_router, check_listenable, make_dealer
from tests.wire_peers import free_tcp_endpoint

Context = zmq.Context[zmq.Socket[bytes]]


class Keys:
    """Of one engine and one frontend, as made by `foreword keys`; the frontend's is authorized."""

    def __init__(self, directory: Path) -> None:
        write_key_set(directory)
        self.authorized = directory / "authorized"
        self.authorized.mkdir()
        (self.authorized / "a.pub").write_bytes((directory / "client.pub").read_bytes())
        (self.authorized / "a.pub").chmod(0o600)
        self.engine = EngineKeys(load_key_pair(directory / "engine.key"), self.authorized)
        self.frontend = FrontendKeys(load_key_pair(directory / "client.key"), load_public_key(directory / "engine.pub"))


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys")


@pytest.fixture
def strange_keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "strange")


@contextmanager
def listening(endpoint: str, keys: EngineKeys | None) -> Iterator[None]:
    """A ROUTER that answers everything with what it received."""
    context: Context = zmq.Context()
    authorizer = None if keys is None else Authorizer(context, keys, DropCounter("test"))
    router = bind_router(context, endpoint, keys=keys, insecure=keys is None)
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            if router.poll(10):
                router.send_multipart(router.recv_multipart())
            if authorizer is not None:
                authorizer.answer()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        context.destroy(linger=0)


def ask(endpoint: str, keys: FrontendKeys | None) -> str:
    """The echo of a message, or why there is none."""
    context: Context = zmq.Context()
    dealer = make_dealer(context, endpoint, keys=keys, insecure=keys is None)
    monitor = dealer.get_monitor_socket(HANDSHAKE_FAILURES)
    dealer.connect(endpoint)
    dealer.send(b"echo")
    poller = zmq.Poller()
    poller.register(dealer, zmq.POLLIN)
    poller.register(monitor, zmq.POLLIN)
    try:
        ready = dict(poller.poll(60_000))
        if dealer in ready:
            return dealer.recv().decode()
        assert monitor in ready, "nothing happened"
        return why_no_handshake(recv_monitor_message(monitor), endpoint, has_keys=keys is not None) or "nothing said"
    finally:
        dealer.disable_monitor()
        context.destroy(linger=0)


def test_who_has_the_right_keys_is_answered(keys: Keys) -> None:
    endpoint = free_tcp_endpoint()
    with listening(endpoint, keys.engine):
        assert ask(endpoint, keys.frontend) == "echo"
        # The engine's own supervisor.
        assert ask(endpoint, keys.engine.as_frontend()) == "echo"


def test_who_has_others_is_told_what_is_wrong(keys: Keys, strange_keys: Keys) -> None:
    endpoint = free_tcp_endpoint()
    with listening(endpoint, keys.engine):
        unknown = FrontendKeys(strange_keys.frontend.own, keys.frontend.engine)
        assert "does not know this frontend's key" in ask(endpoint, unknown)
        assert "does not have the key that is expected" in ask(endpoint, strange_keys.frontend)
        assert "the engine wants keys" in ask(endpoint, None)
        assert ask(endpoint, keys.frontend) == "echo"


def test_an_engine_without_keys_is_not_the_one_expected(keys: Keys) -> None:
    endpoint = free_tcp_endpoint()
    with listening(endpoint, None):
        assert "does not have the key that is expected" in ask(endpoint, keys.frontend)
        assert ask(endpoint, None) == "echo"


def test_keys_come_and_go_without_a_restart(keys: Keys, strange_keys: Keys) -> None:
    endpoint = free_tcp_endpoint()
    newcomer = FrontendKeys(strange_keys.frontend.own, keys.frontend.engine)
    with listening(endpoint, keys.engine):
        assert "not authorised" in ask(endpoint, newcomer)
        (keys.authorized / "b.pub").write_bytes((strange_keys.authorized / "a.pub").read_bytes())
        (keys.authorized / "b.pub").chmod(0o600)
        assert ask(endpoint, newcomer) == "echo"
        (keys.authorized / "a.pub").unlink()
        assert "not authorised" in ask(endpoint, keys.frontend)
        # While the list cannot be trusted, nobody is on it.
        (keys.authorized / "b.pub").chmod(0o666)
        assert "not authorised" in ask(endpoint, newcomer)


def test_an_engine_does_not_start_with_a_list_it_cannot_read(keys: Keys) -> None:
    context: Context = zmq.Context()
    with pytest.raises(KeyFileError, match="nowhere cannot be read"):
        Authorizer(context, EngineKeys(keys.engine.own, Path("nowhere")), DropCounter("test"))
    context.destroy(linger=0)


def test_an_address_in_use_is_said_so_before_anything_is_loaded() -> None:
    endpoint = free_tcp_endpoint()
    check_listenable(endpoint, insecure=True)
    with listening(endpoint, None), pytest.raises(OSError, match=f"cannot listen at {endpoint}: .*in use"):
        check_listenable(endpoint, insecure=True)
    with pytest.raises(ValueError, match="over tcp:// anybody"):
        check_listenable(endpoint)
