"""Server-sent events and clients that go away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from litestar.response.base import ASGIResponse
from litestar.types import Receive, Send

from .errors import ApiError, ClientDisconnectedError, internal_error

logger = logging.getLogger(__name__)
T = TypeVar("T")


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, but cancel it the moment the client goes away. The request's body must have been read.

    Raises ClientDisconnectedError, after `work` has cleaned up.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnectedError
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(ASGIResponse):
    """A `text/event-stream` whose events are bytes already, framing included.

    `first` exists before the response begins, so that whatever is wrong by then still gets a proper status;
    what goes wrong later becomes a last event, made by `error_event`. Each event is sent when the client has
    room for it: a slow reader makes `events` wait. `events` is closed at the end, and at once when the client
    goes away.
    """

    __slots__ = ("_error_event", "_events", "_first")

    _should_set_content_length = False

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes],
        *,
        error_event: Callable[[ApiError], bytes],
        headers: dict[str, str],
    ) -> None:
        super().__init__(
            headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers}, media_type="text/event-stream"
        )
        self._first = first
        self._events = events
        self._error_event = error_event

    async def send_body(self, send: Send, receive: Receive) -> None:
        async with aclosing(self._events):
            # The response has begun: the application could not answer it any more.
            with suppress(ClientDisconnectedError):
                await unless_disconnected(receive, self._send_events(send))

    async def _send_events(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for data in self._events_and_error():
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events_and_error(self) -> AsyncGenerator[bytes]:
        try:
            async for data in self._events:
                yield data
        except ApiError as error:
            yield self._error_event(error)
        except Exception:
            logger.exception("stream_failed")
            yield self._error_event(internal_error("the server failed while it was answering"))


def event(data: bytes, name: bytes | None = None) -> bytes:
    """Frame one line of `data` as a server-sent event."""
    return b"".join((b"" if name is None else b"event: " + name + b"\n", b"data: ", data, b"\n\n"))
