"""A picture's URL → its bytes, as far as a policy allows: `data:`, `http:`, `https:` and `file:`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx

from .data_url import decode_data_url
from .errors import MediaError
from .local_file import read_local_file
from .public_address import is_public
from .web import IsAllowedAddress, Resolve, WebFetcher

SCHEMES = "data:, https:, http: and file:"
INLINE_CHARS = 1 << 16
"""A data: URL up to this long is decoded at once; a thread would take longer to start."""
MAX_WORKERS = 2
NOT_IN_A_HOST = frozenset(":/@?#[]* \\")

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class MediaPolicy:
    """What is loaded. By default only `data:` URLs are.

    - `max_bytes`: of one file, as encoded. 32 MiB is more than a phone's camera writes.
    - `timeout_s`: for one file as a whole, with names, redirects, waiting for a turn and the last byte of the body.
    - `allowed_local_path`: the folder below which `file:` URLs may point, whoever sends them.
    - `allowed_domains`: the hosts that are fetched from, on any port that is not another service's: `example.com` is
      this host alone, `*.example.com` every host below it (without itself). They must be public like all others: a name
      that resolves to a private address is refused even if it stands here.
    - `any_public_host`: fetch from all hosts with public addresses.
    - `max_fetches`: at the same time, a quarter of them from one host; further ones wait. With `max_bytes` it bounds
      what they hold.

    Raises ValueError for a domain that is none, a folder that is none, or a limit that is not positive.
    """

    max_bytes: int = 32 << 20
    timeout_s: float = 10.0
    allowed_local_path: Path | None = None
    allowed_domains: tuple[str, ...] = ()
    any_public_host: bool = False
    max_redirects: int = 3
    max_fetches: int = 16

    def __post_init__(self) -> None:
        for name in ("max_bytes", "timeout_s", "max_fetches"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if self.max_redirects < 0:
            raise ValueError(f"max_redirects must not be negative, as {self.max_redirects} is")
        if self.allowed_local_path is not None and not self.allowed_local_path.is_dir():
            raise ValueError(f"{self.allowed_local_path} is not a folder")
        for domain in self.allowed_domains:
            _ascii_domain(domain)

    @property
    def allows_web(self) -> bool:
        return self.any_public_host or bool(self.allowed_domains)


class MediaLoader:
    """Loads what its policy allows. Use from one event loop; nothing here blocks it.

    `is_allowed_address` decides which addresses may be connected to, `resolve` finds those of a host; the defaults are
    what makes fetching safe, so others are for tests and for programs that know their network. After `close`, loading
    raises RuntimeError.
    """

    def __init__(
        self,
        policy: MediaPolicy,
        *,
        is_allowed_address: IsAllowedAddress = is_public,
        resolve: Resolve | None = None,
    ) -> None:
        self._policy = policy
        self._domains = tuple(map(_ascii_domain, policy.allowed_domains))
        self._local_root = policy.allowed_local_path.resolve() if policy.allowed_local_path else None
        self._workers = ThreadPoolExecutor(MAX_WORKERS, thread_name_prefix="media")
        self._web = WebFetcher(
            is_allowed_host=self._is_allowed_host,
            is_allowed_address=is_allowed_address,
            max_bytes=policy.max_bytes,
            max_redirects=policy.max_redirects,
            max_fetches=policy.max_fetches,
            resolve=resolve,
        )

    async def load(self, url: str) -> bytes:
        """The bytes behind it, at most `policy.max_bytes`, unread. Raises MediaError, within `policy.timeout_s`."""
        try:
            async with asyncio.timeout(self._policy.timeout_s):
                return await self._load(url)
        except TimeoutError as error:
            raise MediaError(f"the picture was not loaded within {self._policy.timeout_s:g} s") from error

    async def close(self) -> None:
        """Ends its threads. What is being loaded may fail."""
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._web.close()

    async def _load(self, url: str) -> bytes:
        scheme = url[:64].partition(":")[0].lower() if ":" in url[:64] else ""
        max_bytes = self._policy.max_bytes
        match scheme:
            case "data" if len(url) <= INLINE_CHARS:
                return decode_data_url(url, max_bytes)
            case "data":
                return await self._in_thread(lambda: decode_data_url(url, max_bytes))
            case "http" | "https" if self._policy.allows_web:
                return await self._web.fetch(url)
            case "http" | "https":
                raise MediaError("this server loads nothing from other hosts; send the picture in a data: URL")
            case "file":
                return await self._in_thread(lambda: read_local_file(url, self._local_root, max_bytes))
            case "":
                raise MediaError(f"not a URL: it begins with none of {SCHEMES}")
        raise MediaError(f"{scheme!r} is not a scheme that is loaded; {SCHEMES} are")

    def _is_allowed_host(self, host: str) -> bool:
        return self._policy.any_public_host or any(
            host.endswith(domain[1:]) if domain.startswith("*") else host == domain for domain in self._domains
        )

    async def _in_thread(self, job: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._workers, job)


def _ascii_domain(text: str) -> str:
    """As hosts are compared: lower case, `xn--…`, no dot at the end. Raises ValueError."""
    below = "*." if text.startswith("*.") else ""
    name = text.removeprefix("*.")
    try:
        host = "" if NOT_IN_A_HOST & set(name) else httpx.URL(f"https://{name}/").raw_host.decode("ascii")
    except (httpx.InvalidURL, ValueError):
        host = ""
    if not all(host.rstrip(".").split(".")):
        raise ValueError(f"{text!r} is not the name of a host, as example.com or *.example.com are")
    return below + host.lower().rstrip(".")
