"""Files from other hosts: fetched so that who wrote the URL reaches nothing that they could not reach themselves.

A URL is parsed once. Its host's name is resolved once, all addresses it has are checked, and the connection goes to
one of those; the name is used for TLS and the Host header only. So there is no second answer of a name server, and no
second reading of the URL, to differ from what was checked. Redirects are followed by hand, each like a new URL. No
proxy, cookie, credential or compression is used, and no connection is kept.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from ipaddress import ip_address
from weakref import WeakValueDictionary

import httpcore
import httpx

from .errors import MediaError
from .public_address import Address

MAX_URL_CHARS = 8192
MAX_ADDRESSES = 4
CONNECT_TIMEOUT_S = 3.0
"""To one address; a name may have several, of which the first may be dead."""
DEFAULT_PORTS = {"http": 80, "https": 443}
ALLOWED_PORTS = {*DEFAULT_PORTS.values(), *range(1024, 1 << 16)}
"""Below 1024 other services listen, which may read something into a request."""
REDIRECTS = {301, 302, 303, 307, 308}
HEADERS = [("Accept", "image/*"), ("Accept-Encoding", "identity"), ("User-Agent", "foreword")]
MAX_RESOLVERS = 8

IsAllowedHost = Callable[[str], bool]
IsAllowedAddress = Callable[[Address], bool]
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class WebFetcher:
    """Use from one event loop.

    `is_allowed_host` gets names in lower case, in ASCII (`xn--…`), without a dot at the end. `resolve` gives all
    addresses of a name (it gets a port, too) or raises OSError; by default the system is asked.
    """

    def __init__(
        self,
        *,
        is_allowed_host: IsAllowedHost,
        is_allowed_address: IsAllowedAddress,
        max_bytes: int,
        max_redirects: int,
        max_fetches: int,
        resolve: Resolve | None = None,
    ) -> None:
        self._is_allowed_host = is_allowed_host
        self._is_allowed_address = is_allowed_address
        self._max_bytes = max_bytes
        self._max_redirects = max_redirects
        self._resolve = resolve or self._ask_system
        self._slots = asyncio.Semaphore(max_fetches)
        # A slow host must not take all of them.
        self._max_fetches_per_host = max(1, max_fetches // 4)
        self._slots_of_host: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        # Not the loop's own threads: names whose servers never answer would hold them for others, too.
        self._resolvers = ThreadPoolExecutor(MAX_RESOLVERS, thread_name_prefix="media-dns")

    async def fetch(self, url: str) -> bytes:
        """What a GET of an http(s) URL is answered with. Takes as long as the host likes. Raises MediaError."""
        target = self._checked(url)
        host = _host(target)
        slots_of_host = self._slots_of_host.setdefault(host, asyncio.Semaphore(self._max_fetches_per_host))
        async with slots_of_host, self._slots:
            for _ in range(self._max_redirects + 1):
                answer = await self._get(target)
                if isinstance(answer, bytes):
                    return answer
                target = self._checked(answer)
        raise MediaError(f"more than {self._max_redirects} redirects")

    def close(self) -> None:
        self._resolvers.shutdown(wait=False, cancel_futures=True)

    def _checked(self, url: str | httpx.URL) -> httpx.URL:
        """The URL, parsed, if this is a place to ask at all."""
        if len(str(url)) > MAX_URL_CHARS:
            raise MediaError(f"a URL of {len(str(url))} characters, more than {MAX_URL_CHARS}")
        parsed = _parse(url) if isinstance(url, str) else url
        if parsed.scheme not in DEFAULT_PORTS:
            raise MediaError(f"a redirect to a {parsed.scheme[:32]}: URL is not followed")
        if parsed.userinfo:
            raise MediaError("a URL with user name or password is not loaded")
        if not (host := _host(parsed)):
            raise MediaError("the URL names no host")
        port = _port(parsed)
        if port not in ALLOWED_PORTS:
            raise MediaError(f"port {port} is not one that pictures are loaded from")
        if not self._is_allowed_host(host):
            raise MediaError(f"the host {host} is not one that this server loads from")
        return parsed

    async def _get(self, url: httpx.URL) -> bytes | httpx.URL:
        """The body, or where to go for it."""
        host, port = _host(url), _port(url)
        addresses = await self._addresses(host, port)
        origin = httpcore.Origin(url.scheme.encode(), host.encode(), port)
        target = httpcore.URL(scheme=origin.scheme, host=origin.host, port=port, target=url.raw_path)
        try:
            async with (
                httpcore.AsyncHTTPConnection(
                    origin,
                    ssl_context=self._ssl_context if url.scheme == "https" else None,
                    network_backend=_CheckedAddresses(addresses),
                ) as connection,
                connection.stream("GET", target, headers=[("Host", _netloc(url)), *HEADERS]) as response,
            ):
                headers = httpx.Headers(response.headers)
                if response.status in REDIRECTS and "location" in headers:
                    return _parse(headers["location"], base=url)
                if response.status != 200:
                    raise MediaError(f"{host} answered with status {response.status}")
                return await self._body(host, headers, response)
        except httpcore.TimeoutException as error:
            raise MediaError(f"{host} does not answer") from error
        except (httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
            raise MediaError(f"the transfer from {host} failed: {str(error) or type(error).__name__}") from error

    async def _body(self, host: str, headers: httpx.Headers, response: httpcore.Response) -> bytes:
        encoding = headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise MediaError(f"{host} sent its answer in content encoding {encoding[:32]!r}, which was not asked for")
        length = headers.get("content-length", "")
        if length.isdecimal():
            self._check_size(host, int(length))
        body = bytearray()
        async for chunk in response.aiter_stream():
            body += chunk
            self._check_size(host, len(body))
            await asyncio.sleep(0)  # a host that sends a byte a chunk must not keep the loop from its other work
        return bytes(body)

    def _check_size(self, host: str, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise MediaError(f"{host} sends {num_bytes} bytes or more, more than {self._max_bytes}")

    async def _addresses(self, host: str, port: int) -> list[Address]:
        try:
            addresses = [ip_address(text) for text in dict.fromkeys(await self._resolve(host, port))]
        except (OSError, UnicodeError) as error:
            raise MediaError(f"the host {host} cannot be found") from error
        # All of them: who owns the name could give a closed address beside a public one, and wait for the turn of it.
        if not addresses or not all(map(self._is_allowed_address, addresses)):
            raise MediaError(f"the host {host} has an address that is not public")
        return addresses[:MAX_ADDRESSES]

    async def _ask_system(self, host: str, port: int) -> Sequence[str]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._resolvers, _look_up, host, port)
        return [str(address[0]) for *_, address in found]

    @cached_property
    def _ssl_context(self) -> ssl.SSLContext:
        return httpx.create_ssl_context()


class _CheckedAddresses(httpcore.AsyncNetworkBackend):
    """Connects to the given addresses, whatever the name it is asked for: to the first one that answers."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._addresses = addresses
        self._tcp = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        *earlier, last = self._addresses
        for address in earlier:
            try:
                return await self._connect(address, port)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        return await self._connect(last, port)

    async def _connect(self, address: Address, port: int) -> httpcore.AsyncNetworkStream:
        return await self._tcp.connect_tcp(str(address), port, timeout=CONNECT_TIMEOUT_S)


def _parse(url: str, base: httpx.URL | None = None) -> httpx.URL:
    # Readers of URLs disagree about these, and none belongs into one.
    if "\\" in url or any(character.isspace() for character in url):
        raise MediaError("a URL has neither spaces nor backslashes")
    try:
        return httpx.URL(url) if base is None else base.join(url)
    except (httpx.InvalidURL, ValueError) as error:
        raise MediaError(f"not a valid URL: {error}") from error


def _host(url: httpx.URL) -> str:
    return url.raw_host.decode("ascii").lower().rstrip(".")


def _port(url: httpx.URL) -> int:
    return url.port if url.port is not None else DEFAULT_PORTS[url.scheme]


def _netloc(url: httpx.URL) -> str:
    host = f"[{_host(url)}]" if ":" in _host(url) else _host(url)
    return host if _port(url) == DEFAULT_PORTS[url.scheme] else f"{host}:{_port(url)}"


def _look_up(host: str, port: int) -> list[tuple]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
