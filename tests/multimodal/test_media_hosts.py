"""Where a URL leads: to hosts that are allowed and public, and nowhere else. Each refusal is shown to be one before any
connection was made."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest

from multimodal.errors import MediaError
from multimodal.public_address import is_public
from tests.multimodal.media_host import PICTURE, Names, http_answer, loader, media_host, redirect

PUBLIC = "93.184.216.34"


# Which hosts are allowed.


@pytest.mark.parametrize(
    ("rule", "host", "allowed"),
    [
        ("pictures.example", "pictures.example", True),
        ("pictures.example", "PICTURES.example", True),
        ("Pictures.Example.", "pictures.example", True),
        ("pictures.example", "pictures.example.", True),
        ("pictures.example", "a.pictures.example", False),
        ("pictures.example", "notpictures.example", False),
        ("pictures.example", "pictures.example.evil.example", False),
        ("*.pictures.example", "a.pictures.example", True),
        ("*.pictures.example", "a.b.pictures.example", True),
        ("*.pictures.example", "pictures.example", False),
        ("*.pictures.example", "notpictures.example", False),
        ("bücher.example", "xn--bcher-kva.example", True),
        ("xn--bcher-kva.example", "BÜCHER.example", True),
    ],
)
async def test_a_domain_is_the_host_itself_and_a_star_those_below_it(rule, host, allowed):
    async def resolve(name, port):
        return ["127.0.0.1"]

    async with media_host(http_answer(PICTURE)) as server, loader(allowed_domains=(rule,), resolve=resolve) as media:
        if allowed:
            assert await media.load(f"http://{host}:{server.port}/") == PICTURE
        else:
            with pytest.raises(MediaError, match="not one that this server loads from"):
                await media.load(f"http://{host}:{server.port}/")
    assert server.num_connections == int(allowed)


# Where a URL does not lead. `listening` counts every connection that reaches this machine at that port.


class Listener:
    def __init__(self, *families: tuple[socket.AddressFamily, str]) -> None:
        self.num_connections = 0
        self._sockets = []
        self.port = 0
        for family, address in families:
            listening = socket.socket(family)
            listening.bind((address, self.port))
            listening.listen()
            self.port = listening.getsockname()[1]
            self._sockets.append(listening)
            threading.Thread(target=self._accept, args=(listening,), daemon=True).start()

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            self.num_connections += 1
            connection.close()

    def close(self) -> None:
        for listening in self._sockets:
            listening.shutdown(socket.SHUT_RDWR)
            listening.close()


@pytest.fixture
def listening():
    families = [(socket.AF_INET, "0.0.0.0")]
    if socket.has_ipv6:
        with socket.socket(socket.AF_INET6) as probe:
            try:
                probe.bind(("::1", 0))
            except OSError:
                pass
            else:
                families.append((socket.AF_INET6, "::1"))
    listener = Listener(*families)
    yield listener
    listener.close()


def test_the_listener_would_notice(listening):
    socket.create_connection(("127.0.0.1", listening.port)).close()
    deadline_s = time.monotonic() + 20
    while not listening.num_connections:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.parametrize(
    "host",
    """
    127.0.0.1 127.0.0.1. 127.1 127.0.1 0x7f000001 0x7f.1 2130706433 017700000001 0177.0.0.1 0 0.0.0.0 localhost
    LOCALHOST localhost. [::1] [::] [0:0:0:0:0:0:0:1] [::ffff:127.0.0.1] [::ffff:7f00:1] [::127.0.0.1]
    [64:ff9b::7f00:1] [2002:7f00:1::] 169.254.169.254 [fd00:ec2::254] [fe80::1] 10.0.0.1 192.168.1.1 100.100.100.200
    １２７.0.0.1 ⑯9.254.169.254 127。0。0。1
    """.split(),
)
@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_no_spelling_of_a_closed_address_is_connected_to(listening, scheme, host):
    """The real name server is asked, and the real check is in place."""
    async with loader(any_public_host=True, is_allowed_address=is_public) as media:
        with pytest.raises(MediaError, match=r"not public|cannot be found|not a valid URL"):
            await media.load(f"{scheme}://{host}:{listening.port}/")
    await asyncio.sleep(0.02)
    assert listening.num_connections == 0


@pytest.mark.parametrize("addresses", [["127.0.0.1"], [PUBLIC, "127.0.0.1"], ["::1", PUBLIC], ["fe80::1%1"], []])
@pytest.mark.parametrize("policy", [{"any_public_host": True}, {"allowed_domains": ("pictures.example",)}])
async def test_a_name_with_any_closed_address_is_not_connected_to(listening, addresses, policy):
    names = Names(pictures_example=[addresses])
    async with loader(is_allowed_address=is_public, resolve=names, **policy) as media:
        with pytest.raises(MediaError, match="not public"):
            await media.load(f"http://pictures.example:{listening.port}/")
    assert names.asked == ["pictures.example"]
    assert listening.num_connections == 0


async def test_a_name_is_resolved_once_and_connected_to_where_it_was_checked():
    """A name server that answers otherwise the second time is not asked a second time."""
    names = Names(rebinding_example=[["127.0.0.1"], ["127.0.0.2"]])
    async with media_host(http_answer(PICTURE)) as checked, loader(any_public_host=True, resolve=names) as media:
        assert await media.load(f"http://rebinding.example:{checked.port}/") == PICTURE
        with pytest.raises(MediaError, match="not public"):  # the next picture is a new question
            await media.load(f"http://rebinding.example:{checked.port}/")
    assert names.asked == ["rebinding.example"] * 2
    assert checked.num_connections == 1


@pytest.mark.parametrize("addresses", [["127.0.0.2", "127.0.0.1"], ["127.0.0.1", "127.0.0.2"]])
async def test_of_several_addresses_the_first_that_answers_is_used(addresses):
    names = Names(pictures_example=[addresses])
    every_loopback = lambda address: address.is_loopback  # noqa: E731
    async with (
        media_host(http_answer(PICTURE)) as host,
        loader(any_public_host=True, is_allowed_address=every_loopback, resolve=names) as media,
    ):
        assert await media.load(f"http://pictures.example:{host.port}/") == PICTURE


async def test_over_tls_the_name_is_sent_and_the_checked_address_connected_to():
    hellos = []

    async def hang_up_after_hello(reader, writer):
        hellos.append(await reader.read(4096))
        writer.close()

    server = await asyncio.start_server(hang_up_after_hello, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, loader(any_public_host=True, resolve=Names(pictures_example=[["127.0.0.1"]])) as media:
        with pytest.raises(MediaError, match=r"transfer from pictures.example failed"):
            await media.load(f"https://pictures.example:{port}/")
    assert b"pictures.example" in hellos[0]


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://user@{host}/", "user name or password"),
        ("http://user:secret@{host}/", "user name or password"),
        ("http://pictures.example:secret@127.0.0.1:{port}/", "user name or password"),
        ("http://pictures.example\\@127.0.0.1:{port}/", "backslashes"),
        ("http://pictures.example /", "spaces"),
        ("http://{host}/a\tb", "spaces"),
        ("http://{host}/a\r\nX: y", "spaces"),
        ("http://{host}/a\0b", "not a valid URL"),
        ("http:///a.png", "no host"),
        ("http://", "no host"),
        ("http://./", "no host"),
        ("http:pictures.example", "no host"),
        ("http://[::1/", "not a valid URL"),
        ("http://pictures.example:99999/", "not a valid URL|port 99999"),
        ("http://pictures.example:port/", "not a valid URL"),
        ("http://pictures.example:0/", "port 0"),
        ("http://pictures.example:22/", "port 22"),
        ("https://pictures.example:25/", "port 25"),
        ("http://{host}/" + "x" * 9000, "characters"),
        ("http://" + "x" * 70 + ".example/", "cannot be found|not a valid URL"),
    ],
)
async def test_urls_that_readers_disagree_about_are_refused(listening, url, reason):
    names = Names(pictures_example=[["127.0.0.1"]])
    async with loader(any_public_host=True, resolve=names) as media:
        with pytest.raises(MediaError, match=reason) as refused:
            await media.load(url.format(host=f"pictures.example:{listening.port}", port=listening.port))
    assert "secret" not in str(refused.value)
    assert listening.num_connections == 0


async def test_a_name_that_does_not_exist_is_an_error_of_the_sender():
    async with loader(any_public_host=True, resolve=Names()) as media:
        with pytest.raises(MediaError, match=r"host missing\.example cannot be found"):
            await media.load("http://missing.example/")


# Redirects.


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"])
async def test_redirects_are_followed_to_hosts_that_are_allowed(status):
    names = Names(first_example=[["127.0.0.1"]], second_example=[["127.0.0.1"]])
    async with (
        media_host(http_answer(PICTURE)) as second,
        media_host(redirect(f"http://second.example:{second.port}/x", status)) as first,
        loader(allowed_domains=("first.example", "second.example"), resolve=names) as media,
    ):
        assert await media.load(f"http://first.example:{first.port}/") == PICTURE
    assert names.asked == ["first.example", "second.example"]


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("http://127.0.0.2:{port}/", "not public"),
        ("http://closed.example:{port}/", "not public"),
        ("//[::1]:{port}/", "not public"),
        ("http://169.254.169.254/latest/meta-data/", "not public"),
        ("file:///etc/passwd", "redirect to a file: URL"),
        ("data:,x", "redirect to a data: URL"),
        ("gopher://127.0.0.1:{port}/", "redirect to a gopher: URL"),
        ("http://user:secret@first.example/", "user name or password"),
        ("http://first.example:22/", "port 22"),
        ("http://[::1/", "not a valid URL"),
        ("x" * 65_530, "not a valid URL: URL too long"),
    ],
)
async def test_a_redirect_is_checked_like_a_new_url(listening, location, reason):
    async def resolve(host, port):
        return [{"first.example": "127.0.0.1", "closed.example": "127.0.0.2"}.get(host, host)]

    async with (
        media_host(redirect(location.format(port=listening.port))) as first,
        loader(any_public_host=True, resolve=resolve) as media,
    ):
        with pytest.raises(MediaError, match=reason):
            await media.load(f"http://first.example:{first.port}/")
    assert first.num_connections == 1
    assert listening.num_connections == 0


async def test_a_redirect_to_a_host_that_is_not_allowed_is_not_even_resolved():
    names = Names(first_example=[["127.0.0.1"]], other_example=[["127.0.0.1"]])
    async with (
        media_host(redirect("http://other.example/")) as first,
        loader(allowed_domains=("first.example",), resolve=names) as media,
    ):
        with pytest.raises(MediaError, match=r"other\.example is not one"):
            await media.load(f"http://first.example:{first.port}/")
    assert names.asked == ["first.example"]


async def test_redirects_end():
    names = Names(first_example=[["127.0.0.1"]])
    async with (
        media_host(redirect("/again")) as host,
        loader(any_public_host=True, resolve=names, max_redirects=3) as media,
    ):
        with pytest.raises(MediaError, match="more than 3 redirects"):
            await media.load(f"http://first.example:{host.port}/")
    assert host.num_connections == 4
    assert [head.split()[1] for head in host.requests] == ["/"] + ["/again"] * 3


async def test_proxies_of_the_environment_are_not_used(monkeypatch, listening):
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{listening.port}")
    names = Names(good_example=[["127.0.0.1"]])
    async with media_host(http_answer(PICTURE)) as host, loader(any_public_host=True, resolve=names) as media:
        assert await media.load(f"http://good.example:{host.port}/") == PICTURE
    assert listening.num_connections == 0
