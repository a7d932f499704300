"""Loading: what a policy allows, and hosts that misbehave. They are real servers; their names are made up."""

from __future__ import annotations

import asyncio
import base64
import gzip
import socket
import tracemalloc

import pytest

from multimodal.errors import MediaError
from multimodal.media import MediaPolicy
from tests.multimodal.media_host import PICTURE, Names, http_answer, loader, media_host, redirect

# What is loaded.


async def test_a_picture_is_fetched_from_a_host_that_is_allowed():
    names = Names(pictures_example=[["127.0.0.1"]])
    async with (
        media_host(http_answer(PICTURE)) as host,
        loader(allowed_domains=("pictures.example",), resolve=names) as media,
    ):
        assert await media.load(f"http://pictures.example:{host.port}/a/b.png?size=2#part") == PICTURE
    head = host.requests[0].lower()
    assert head.startswith("get /a/b.png?size=2 http/1.1\r\n")
    assert f"\r\nhost: pictures.example:{host.port}\r\n" in head
    assert "\r\naccept-encoding: identity\r\n" in head


@pytest.mark.parametrize("size", [10, 200_000])
async def test_data_urls_need_no_permission(size):
    content = bytes(size)
    async with loader() as media:
        assert await media.load("data:image/png;base64," + base64.b64encode(content).decode()) == content
        with pytest.raises(MediaError, match="incomplete"):
            await media.load("data:image/png;base64," + "A" * (size * 2 + 1))


async def test_files_are_loaded_below_the_folder_that_is_allowed(tmp_path):
    (tmp_path / "a.png").write_bytes(PICTURE)
    async with loader(allowed_local_path=tmp_path) as media:
        assert await media.load(f"file://{tmp_path.resolve()}/a.png") == PICTURE
        with pytest.raises(MediaError, match="below the folder"):
            await media.load("file:///etc/passwd")
    async with loader() as media:
        with pytest.raises(MediaError, match="no file: URLs"):
            await media.load("file:///etc/passwd")


@pytest.mark.parametrize("url", ["http://pictures.example/", "https://pictures.example/"])
async def test_by_default_nothing_is_fetched(url):
    names = Names(pictures_example=[["127.0.0.1"]])
    async with loader(resolve=names) as media:
        with pytest.raises(MediaError, match="loads nothing from other hosts"):
            await media.load(url)
    assert not names.asked


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("ftp://pictures.example/a.png", "'ftp' is not a scheme"),
        ("gopher://127.0.0.1:6379/_x", "'gopher' is not a scheme"),
        ("javascript:alert(1)", "'javascript' is not a scheme"),
        ("iVBORw0KGgo=", "not a URL"),
        ("", "not a URL"),
        ("//pictures.example/a.png", "not a URL"),
        (" http://pictures.example/", "' http' is not a scheme"),
    ],
)
async def test_other_schemes_are_named_and_refused(url, reason):
    async with loader(any_public_host=True) as media:
        with pytest.raises(MediaError, match=reason):
            await media.load(url)


@pytest.mark.parametrize(
    "policy",
    [
        {"allowed_domains": ("http://pictures.example",)},
        {"allowed_domains": ("pictures.example:80",)},
        {"allowed_domains": ("pictures.example/a",)},
        {"allowed_domains": ("user@pictures.example",)},
        {"allowed_domains": ("*",)},
        {"allowed_domains": ("a.*.example",)},
        {"allowed_domains": ("",)},
        {"allowed_domains": (".",)},
        {"allowed_domains": ("pictures..example",)},
        {"max_bytes": 0},
        {"timeout_s": 0.0},
        {"timeout_s": float("nan")},
        {"max_redirects": -1},
        {"max_fetches": 0},
    ],
)
def test_a_policy_without_sense_is_refused_when_it_is_made(policy):
    with pytest.raises(ValueError):
        MediaPolicy(**policy)


def test_the_folder_of_files_must_exist(tmp_path):
    with pytest.raises(ValueError, match="is not a folder"):
        MediaPolicy(allowed_local_path=tmp_path / "missing")


# Hosts that misbehave.


async def refusal(answer, **policy):
    """What loading from a host that answers so is refused with."""
    names = Names(bad_example=[["127.0.0.1"]])
    async with media_host(answer) as host, loader(any_public_host=True, resolve=names, **policy) as media:
        with pytest.raises(MediaError) as refused:
            await media.load(f"http://bad.example:{host.port}/?token=secret")
    assert "secret" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("status", ["204 No Content", "206 Partial", "304 Not Modified", "404 Not Found", "500 Oops"])
async def test_a_status_other_than_200_is_told(status):
    assert f"answered with status {status[:3]}" in await refusal(http_answer(b"", status=status))


async def test_a_redirect_to_nowhere_is_a_status():
    assert "status 302" in await refusal(http_answer(b"", status="302 Found"))


async def test_a_body_that_is_announced_too_large_is_not_read():
    sent = []

    async def announce(writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n")
        await writer.drain()
        while not writer.is_closing():
            sent.append(writer.write(bytes(1)))
            await asyncio.sleep(0.05)
            await writer.drain()

    assert "1001 bytes" in await refusal(announce, max_bytes=1000)
    assert len(sent) < 100


@pytest.mark.parametrize("framing", ["until the end", "chunked"])
async def test_an_endless_body_is_cut_at_the_limit(framing):
    async def flood(writer):
        writer.write(b"HTTP/1.1 200 OK\r\n")
        writer.write(b"Transfer-Encoding: chunked\r\n\r\n" if framing == "chunked" else b"\r\n")
        while True:
            writer.write(b"10000\r\n" + bytes(1 << 16) + b"\r\n" if framing == "chunked" else bytes(1 << 16))
            await writer.drain()

    tracemalloc.start()
    assert "more than 1000000" in await refusal(flood, max_bytes=1_000_000)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 8_000_000


async def test_a_body_of_exactly_the_limit_is_loaded():
    names = Names(good_example=[["127.0.0.1"]])
    async with (
        media_host(http_answer(PICTURE)) as host,
        loader(any_public_host=True, resolve=names, max_bytes=len(PICTURE)) as media,
    ):
        assert await media.load(f"http://good.example:{host.port}/") == PICTURE


async def test_a_body_shorter_than_announced_is_an_error():
    assert "transfer from bad.example failed" in await refusal(http_answer(PICTURE, "Content-Length: 1000"))


async def test_a_body_longer_than_announced_ends_where_it_was_announced():
    names = Names(lying_example=[["127.0.0.1"]])
    async with (
        media_host(http_answer(PICTURE + b"more", f"Content-Length: {len(PICTURE)}")) as host,
        loader(any_public_host=True, resolve=names) as media,
    ):
        assert await media.load(f"http://lying.example:{host.port}/") == PICTURE


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip"])
async def test_compressed_bodies_are_refused_unread(encoding):
    """So there is no bomb: 30 MB of zeros are 30 KB on the wire."""
    bomb = gzip.compress(bytes(30_000_000))
    assert "content encoding" in await refusal(http_answer(bomb, f"Content-Encoding: {encoding}"))


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.0\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: minus one\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 300_000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n",
        b"HTTP/1.1 two hundred\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 100,
    ],
    ids=range(8),
)
async def test_what_is_not_http_is_an_error_of_the_host(answer):
    assert "transfer from bad.example failed" in await refusal(answer)


async def test_a_host_that_is_not_there_is_told():
    names = Names(gone_example=[["127.0.0.1"]])
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, so that nobody else gets the port, and not listening
        async with loader(any_public_host=True, resolve=names) as media:
            with pytest.raises(MediaError, match=r"transfer from gone\.example failed"):
                await media.load(f"http://gone.example:{closed.getsockname()[1]}/")


async def slow_head(writer):
    for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n":
        writer.write(bytes([byte]))
        await asyncio.sleep(0.05)
    await asyncio.sleep(60)


async def slow_body(writer):
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.05)


async def endless_informational(writer):
    while True:
        writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.01)


async def silent(writer):
    await asyncio.sleep(60)


@pytest.mark.parametrize("answer", [slow_head, slow_body, endless_informational, silent])
async def test_a_slow_host_is_given_up_while_others_are_loaded(answer):
    names = Names(slow_example=[["127.0.0.1"]], good_example=[["127.0.0.1"]])
    async with (
        media_host(answer) as slow,
        media_host(http_answer(PICTURE)) as good,
        loader(any_public_host=True, resolve=names, timeout_s=1.5) as media,
    ):
        loading = asyncio.create_task(media.load(f"http://slow.example:{slow.port}/"))
        for _ in range(5):
            assert await media.load(f"http://good.example:{good.port}/") == PICTURE
        with pytest.raises(MediaError, match=r"not loaded within 1\.5 s"):
            await asyncio.wait_for(loading, 20)


async def test_a_name_server_that_never_answers_is_given_up():
    async def resolve(host, port):
        await asyncio.sleep(60)

    async with loader(any_public_host=True, resolve=resolve, timeout_s=0.2) as media:
        with pytest.raises(MediaError, match="not loaded within"):
            await asyncio.wait_for(media.load("http://slow.example/"), 20)


async def test_redirects_and_slow_answers_share_one_time():
    async def late_redirect(writer):
        await asyncio.sleep(0.2)
        writer.write(redirect("/again"))

    assert "not loaded within 0.5 s" in await refusal(late_redirect, timeout_s=0.5, max_redirects=100)


async def test_only_so_many_are_fetched_at_once_and_the_others_wait():
    at_once, most = 0, 0
    three_at_once = asyncio.Event()

    async def count(writer):
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        if at_once == 3:
            three_at_once.set()
        await three_at_once.wait()
        await asyncio.sleep(0.05)  # in which a fourth one would come
        at_once -= 1
        writer.write(http_answer(PICTURE))

    names = Names(good_example=[["127.0.0.1"]], fine_example=[["127.0.0.1"]], new_example=[["127.0.0.1"]])
    hosts = ("good.example", "fine.example", "new.example")
    async with media_host(count) as host, loader(any_public_host=True, resolve=names, max_fetches=3) as media:
        urls = [f"http://{hosts[number % 3]}:{host.port}/{number}" for number in range(9)]
        assert await asyncio.gather(*map(media.load, urls)) == [PICTURE] * 9
    assert most == 3


async def test_a_slow_host_leaves_turns_to_others():
    names = Names(slow_example=[["127.0.0.1"]], good_example=[["127.0.0.1"]])
    never = asyncio.Event()
    num_asked = 0

    async def never_answer(_writer):
        nonlocal num_asked
        num_asked += 1
        await never.wait()

    async with (
        media_host(never_answer) as slow,
        media_host(http_answer(PICTURE)) as good,
        loader(any_public_host=True, resolve=names, max_fetches=8) as media,
    ):
        waiting = [asyncio.create_task(media.load(f"http://slow.example:{slow.port}/{n}")) for n in range(50)]
        assert await media.load(f"http://good.example:{good.port}/") == PICTURE
        assert num_asked <= 2
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        never.set()


async def test_a_loading_that_is_cancelled_hangs_up_and_frees_its_turn():
    answering, hung_up = asyncio.Event(), asyncio.Event()

    async def wait_for_the_end(writer):
        answering.set()
        while not writer.transport.is_closing():
            writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\n")
            await asyncio.sleep(0.01)
        hung_up.set()

    names = Names(slow_example=[["127.0.0.1"]], good_example=[["127.0.0.1"]])
    async with (
        media_host(wait_for_the_end) as slow,
        media_host(http_answer(PICTURE)) as good,
        loader(any_public_host=True, resolve=names, max_fetches=1) as media,
    ):
        loading = asyncio.create_task(media.load(f"http://slow.example:{slow.port}/"))
        await answering.wait()
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert await media.load(f"http://good.example:{good.port}/") == PICTURE
        await asyncio.wait_for(hung_up.wait(), 20)


async def test_a_body_in_single_bytes_leaves_the_loop_to_others():
    """All of it is there at once; still other work gets its turn between a few bytes."""

    async def crumbs(writer):
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 20_000 + b"0\r\n\r\n")
        await writer.drain()

    turns = 0

    async def count_turns():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    names = Names(crumbs_example=[["127.0.0.1"]])
    async with media_host(crumbs) as host, loader(any_public_host=True, resolve=names) as media:
        counting = asyncio.create_task(count_turns())
        assert await media.load(f"http://crumbs.example:{host.port}/") == b"x" * 20_000
        counting.cancel()
    assert turns > 10_000


async def test_after_closing_nothing_is_loaded(tmp_path):
    async with loader(any_public_host=True, allowed_local_path=tmp_path) as media:
        await media.close()
        for url in (f"file://{tmp_path}/a.png", "http://pictures.example/"):
            with pytest.raises(RuntimeError):
                await media.load(url)
