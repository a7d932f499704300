"""`/health`: the truth about the engine; `/version`."""

from __future__ import annotations

from typing import Literal

import msgspec
from litestar import HttpMethod, get, route
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse

from .engine_client import EngineClient
from .version import foreword_version


class Health(msgspec.Struct):
    """`num_requests`: those of this frontend that the engine is working on."""

    status: Literal["ready", "connecting", "down"]
    reason: str | None
    num_requests: int


class Version(msgspec.Struct):
    version: str


def down_reason(client: EngineClient) -> str | None:
    """Why there is no engine to answer, for clients; None if there is one."""
    # What the engine client says until then names the engine's socket, which is nobody's business out there.
    return "the engine is starting" if client.state == "connecting" else client.down_reason


def health_routes(client: EngineClient) -> list[HTTPRouteHandler]:
    """Route handlers that tell how `client` fares."""

    @route("/health", http_method=[HttpMethod.GET, HttpMethod.HEAD])
    async def health() -> ASGIResponse:
        body = Health(client.state, down_reason(client), client.num_in_flight)
        return ASGIResponse(body=msgspec.json.encode(body), status_code=200 if client.state == "ready" else 503)

    @get("/version")
    async def server_version() -> ASGIResponse:
        return ASGIResponse(body=msgspec.json.encode(Version(foreword_version())))

    return [health, server_version]
