"""An endpoint is what it says, or is refused with the reason."""

from __future__ import annotations

import pytest

from ipc.curve import check_security
from ipc.endpoints import check_endpoint, is_tcp, local_endpoint, tcp_address


@pytest.mark.parametrize(
    ("endpoint", "host", "port", "is_ipv6"),
    [
        ("tcp://127.0.0.1:5555", "127.0.0.1", 5555, False),
        ("tcp://engine-1.example:1", "engine-1.example", 1, False),
        ("tcp://*:65535", "*", 65535, False),
        ("tcp://[::1]:5555", "::1", 5555, True),
        ("tcp://[fe80::1%eth0]:5555", "fe80::1%eth0", 5555, True),
    ],
)
def test_tcp_addresses(endpoint: str, host: str, port: int, is_ipv6: bool) -> None:
    assert is_tcp(endpoint)
    check_endpoint(endpoint)
    address = tcp_address(endpoint)
    assert (address.host, address.port, address.is_ipv6) == (host, port, is_ipv6)


@pytest.mark.parametrize(
    ("endpoint", "complaint"),
    [
        ("tcp://127.0.0.1", "must be tcp://host:port"),
        ("tcp://:5555", "must be tcp://host:port"),
        ("tcp://::1:5555", "must be tcp://host:port"),
        ("tcp://a b:5555", "must be tcp://host:port"),
        ("tcp://host:5555;127.0.0.1:1", "must be tcp://host:port"),
        ("tcp://host:0", "in 1 … 65535"),
        ("tcp://host:65536", "in 1 … 65535"),
        ("inproc://x", "must start with ipc:// or tcp://"),
        ("127.0.0.1:5555", "must start with ipc:// or tcp://"),
    ],
)
def test_what_is_no_endpoint(endpoint: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        check_endpoint(endpoint)


@pytest.mark.parametrize(
    ("endpoint", "local"),
    [
        ("tcp://0.0.0.0:5555", "tcp://127.0.0.1:5555"),
        ("tcp://*:5555", "tcp://127.0.0.1:5555"),
        ("tcp://[::]:5555", "tcp://[::1]:5555"),
        ("tcp://192.0.2.7:5555", "tcp://192.0.2.7:5555"),
        ("ipc:///run/engine", "ipc:///run/engine"),
    ],
)
def test_an_engine_everywhere_is_also_here(endpoint: str, local: str) -> None:
    assert local_endpoint(endpoint) == local


@pytest.mark.parametrize(
    ("endpoint", "has_keys", "insecure", "complaint"),
    [
        ("ipc:///run/engine", False, False, None),
        ("ipc:///run/engine", False, True, None),
        ("ipc:///run/engine", True, False, "keys are for tcp://"),
        ("tcp://127.0.0.1:5555", True, False, None),
        ("tcp://127.0.0.1:5555", False, True, None),
        # Loopback is everybody's on this machine.
        ("tcp://127.0.0.1:5555", False, False, "over tcp:// anybody could use the engine"),
        ("tcp://127.0.0.1:5555", True, True, "not both"),
    ],
)
def test_nothing_without_protection(endpoint: str, has_keys: bool, insecure: bool, complaint: str | None) -> None:
    if complaint is None:
        check_security(endpoint, has_keys=has_keys, insecure=insecure)
        return
    with pytest.raises(ValueError, match=complaint):
        check_security(endpoint, has_keys=has_keys, insecure=insecure)
