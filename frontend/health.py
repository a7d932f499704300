"""`/health`: the truth about the engines; `/version`."""

from __future__ import annotations

from typing import Literal

import msgspec
from litestar import HttpMethod, get, route
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse

from .engine_client import EngineClient
from .engine_pool import EnginePool, reason_for_clients
from .version import foreword_version

Status = Literal["ready", "connecting", "draining", "down"]


class EngineHealth(msgspec.Struct):
    """`engine` counts them in the order of the command line. `num_other_requests` are those of other frontends."""

    engine: int
    status: Status
    reason: str | None
    num_requests: int
    num_other_requests: int


class Health(msgspec.Struct):
    """`status` is `ready` if that of any engine is. `num_requests`: those of this frontend that engines work on."""

    status: Status
    reason: str | None
    num_requests: int
    engines: list[EngineHealth]


class Version(msgspec.Struct):
    version: str


def _engine_health(engine: EngineClient) -> EngineHealth:
    return EngineHealth(
        engine.index, engine.state, reason_for_clients(engine), engine.num_in_flight, engine.num_other_requests
    )


def health_routes(client: EnginePool) -> list[HTTPRouteHandler]:
    """Route handlers that tell how `client` fares."""

    @route("/health", http_method=[HttpMethod.GET, HttpMethod.HEAD])
    async def health() -> ASGIResponse:
        engines = [_engine_health(engine) for engine in client.engines]
        body = Health(client.state, reason_for_clients(client), client.num_in_flight, engines)
        return ASGIResponse(body=msgspec.json.encode(body), status_code=200 if client.state == "ready" else 503)

    @get("/version")
    async def server_version() -> ASGIResponse:
        return ASGIResponse(body=msgspec.json.encode(Version(foreword_version())))

    return [health, server_version]
