"""What soak tests of a `foreword serve` share: its children die and come back, and at last nothing is left in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import psutil

from tests.integration.served import Server

LIVENESS_S = 60.0
CHILDREN = ("engine_core.server", "frontend.http_process")
NUM_WORKERS = 6


@asynccontextmanager
async def working(work: Callable[[asyncio.Event], Awaitable[None]]) -> AsyncIterator[None]:
    """While inside, workers do `work` until its event is set; at the end what they do is finished first."""
    ending = asyncio.Event()

    async def worker() -> None:
        await work(ending)

    async with asyncio.TaskGroup() as workers:
        for _ in range(NUM_WORKERS):
            workers.create_task(worker())
        try:
            yield
        finally:
            ending.set()


async def replaced(server: Server, module: str) -> None:
    """Kill the child and wait for the next one to answer."""
    killed = server.child(module)
    killed.kill()
    async with asyncio.timeout(LIVENESS_S), httpx.AsyncClient(base_url=server.url, timeout=LIVENESS_S) as http:
        # Until then, what answers may not have noticed.
        while not _is_started(server, module, but=killed.pid):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)
        while not await _is_ready(http):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.1)


def _is_started(server: Server, module: str, *, but: int) -> bool:
    try:
        return server.child(module).pid != but
    except (ValueError, psutil.Error):
        # There is none, or it has just ended.
        return False


async def idle(server: Server, pool_tokens: int) -> None:
    """Returns when nothing is in flight, and checks that every block is free: one request has them all."""
    async with asyncio.timeout(LIVENESS_S), httpx.AsyncClient(base_url=server.url, timeout=LIVENESS_S) as http:
        while not await _is_idle(http):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.1)
        body = {"prompt": [5], "max_tokens": pool_tokens - 1, "ignore_eos": True}
        answer = (await http.post("/v1/completions", json=body)).raise_for_status().json()
        assert answer["usage"]["total_tokens"] == pool_tokens


async def _is_idle(http: httpx.AsyncClient) -> bool:
    try:
        health = (await http.get("/health")).json()
    except httpx.TransportError:
        return False
    return bool(health["status"] == "ready" and health["num_requests"] == 0)


async def _is_ready(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/health")).status_code == 200
    except httpx.TransportError:
        return False
