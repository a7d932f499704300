"""A host of pictures that can be told to misbehave, and a name server that says what a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address

from multimodal.media import MediaLoader, MediaPolicy
from multimodal.public_address import Address, is_public

PICTURE = b"as good as a picture"
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


@dataclass
class MediaHost:
    """`num_connections` counts what was accepted, before a byte was read. `requests` holds the heads that came."""

    port: int
    num_connections: int = 0
    requests: list[str] = field(default_factory=list)


@asynccontextmanager
async def media_host(answer: bytes | Answer, address: str = "127.0.0.1") -> AsyncIterator[MediaHost]:
    """Answers every request with these bytes (head included), or by calling `answer`; then hangs up."""
    host = MediaHost(0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host.num_connections += 1
        try:
            host.requests.append((await reader.readuntil(b"\r\n\r\n")).decode("latin-1"))
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, address, 0)
    host.port = server.sockets[0].getsockname()[1]
    try:
        yield host
    finally:
        server.close()


def http_answer(body: bytes = b"", *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", *headers]
    if not any(header.lower().startswith(("content-length", "transfer-encoding")) for header in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def redirect(location: str, status: str = "302 Found") -> bytes:
    return http_answer(b"", f"Location: {location}", status=status)


def local_or_public(address: Address) -> bool:
    """The test hosts count as public; all other closed addresses do not."""
    return address == ip_address("127.0.0.1") or is_public(address)


@asynccontextmanager
async def loader(*, is_allowed_address=local_or_public, resolve=None, **policy) -> AsyncIterator[MediaLoader]:
    made = MediaLoader(MediaPolicy(**policy), is_allowed_address=is_allowed_address, resolve=resolve)
    try:
        yield made
    finally:
        await made.close()


class Names:
    """A name server: the answers to each name, one after the other, the last one for ever."""

    def __init__(self, **answers: list[list[str]]) -> None:
        self._answers = {name.replace("_", "."): list(lists) for name, lists in answers.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        answers = self._answers.get(host)
        if answers is None:
            raise OSError("no such name")
        return answers.pop(0) if len(answers) > 1 else answers[0]
