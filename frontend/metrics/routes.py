"""`GET /metrics`, for Prometheus."""

from __future__ import annotations

from litestar import Request, get
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse
from prometheus_client.exposition import choose_encoder

from . import Metrics


def metrics_routes(metrics: Metrics) -> list[HTTPRouteHandler]:
    """Route handlers that show `metrics`."""

    @get("/metrics")
    async def show_metrics(request: Request) -> ASGIResponse:
        await metrics.refresh()
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return ASGIResponse(body=encode(metrics.registry), headers={"content-type": content_type})

    return [show_metrics]
