"""How a server that is told to stop ends what it is doing."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

import uvicorn

logger = logging.getLogger(__name__)

# For requests that were ended to say so to their clients.
_LAST_WORDS_S = 2.0


class DrainingServer(uvicorn.Server):
    """Stops in three steps: no new connections; after `drain_timeout_s` what still runs is ended by `end_requests`,
    which lets every answer come to an end of its own; connections that take no end even so are cut.

    uvicorn alone would cancel the requests, which their clients see as an answer that breaks off.
    """

    def __init__(
        self, config: uvicorn.Config, *, drain_timeout_s: float, end_requests: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(config)
        self._drain_timeout_s = drain_timeout_s
        self._end_requests = end_requests

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        stopped = asyncio.create_task(super().shutdown(sockets))
        await asyncio.wait([stopped], timeout=self._drain_timeout_s)
        if not stopped.done():
            logger.warning("drain_timeout requests=%d", len(self.server_state.tasks))
            await self._end_requests()
            await asyncio.wait([stopped], timeout=_LAST_WORDS_S)
        elif self.server_state.tasks:
            # A second signal ended the waiting. They are still told why.
            await self._end_requests()
        if not stopped.done():
            for connection in self.server_state.connections:
                # To a request this looks as if its client had left: it ends quietly.
                connection.transport.abort()
        await stopped
