"""The outputs of one request on their way from the engine's client to whoever reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from ipc.vocabulary import RequestOutput

from .engine_errors import RequestRefusedError


class StreamOwner(Protocol):
    """What a stream asks of the client that made it."""

    index: int

    def forget(self, stream: RequestStream) -> None:
        """Nobody reads the stream any more: abort the request, if it is still the client's."""
        ...

    def abort_continuation(self, request_id: str, index: int) -> None:
        """End one continuation in the engine."""
        ...


class RequestStream:
    """The outputs of one request, in order and without gaps. Made by `EngineClient.submit`.

    An async context manager: leaving it aborts the request if it has not finished. An async iterator for one
    consumer: each item carries at least one new token or the `finish_reason` (`stop`, `length` or `abort`) of one
    continuation; after the last continuation's end it stops. A slow consumer loses nothing: what arrived meanwhile
    comes as one item per continuation, the one that has waited longest first. `on_arrival`, if set before anything was
    awaited, is told each output when it arrives, however slow the consumer is; it must not change it.

    Raises (from iteration, after all tokens that arrived were handed over):
        EngineUnavailableError: the engine was lost.
        RequestRefusedError: the engine refused the request, or gave it up.
    """

    def __init__(self, client: StreamOwner, request_id: str, num_continuations: int) -> None:
        self.request_id = request_id
        self.on_arrival: Callable[[RequestOutput], None] | None = None
        self._client = client
        # Counted here: the engine cannot tell that a request is over whose last continuation was aborted.
        self._unfinished = set(range(num_continuations))
        self._pending: dict[int, RequestOutput] = {}
        self._failure: Exception | None = None
        self._ended = False
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()

    @property
    def engine_index(self) -> int:
        """Of the engine that computes the request."""
        return self._client.index

    def abort(self) -> None:
        """End the request now if it has not ended; iteration then stops. Idempotent, never blocks."""
        self._client.forget(self)
        self._ended = True
        self._changed.set()

    def abort_continuation(self, index: int) -> None:
        """End one continuation, of which an output has come: no other will. Idempotent, never blocks.

        The others run on; without any left, the request is aborted.
        """
        self._pending.pop(index, None)
        if index not in self._unfinished:
            return
        self._unfinished.discard(index)
        if self._unfinished:
            self._client.abort_continuation(self.request_id, index)
        else:
            self.abort()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        while True:
            if self._pending:
                return self._pending.pop(next(iter(self._pending)))
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            if self._ended:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()

    def deliver(self, output: RequestOutput) -> None:
        """Take what the engine said. For the client only."""
        if self.on_arrival is not None and output.index in self._unfinished:
            self.on_arrival(output)
        if output.error is not None:
            if output.new_token_ids:
                self._merge(RequestOutput(output.request_id, output.new_token_ids, output.num_cached_tokens))
            self.fail(RequestRefusedError(output.error))
            return
        if output.index in self._unfinished:
            self._merge(output)
            if output.finish_reason is not None:
                self._unfinished.discard(output.index)
        if output.ends_request or not self._unfinished:
            self.abort()

    def _merge(self, output: RequestOutput) -> None:
        if (waiting := self._pending.get(output.index)) is not None:
            waiting.absorb(output)
        else:
            self._pending[output.index] = output
        self._changed.set()

    def fail(self, failure: Exception) -> None:
        """Nothing more comes; iteration raises `failure` after what has arrived. For the client only."""
        self._failure = failure
        self._ended = True
        self._changed.set()
