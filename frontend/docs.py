"""`/docs`: the API's description, rendered by Swagger UI from files of this machine."""

from __future__ import annotations

from pathlib import Path

import msgspec
import swagger_ui_bundle
from litestar import Request, get
from litestar.exceptions import NotFoundException
from litestar.handlers import HTTPRouteHandler
from litestar.response import Redirect
from litestar.response.base import ASGIResponse

from .openapi import openapi_document

_ASSETS = {
    "swagger-ui.css": "text/css",
    "swagger-ui-bundle.js": "text/javascript",
    "favicon-32x32.png": "image/png",
}

# What is the same on every server tells nobody anything: a browser cannot send a key to read it.
DOCS_PATHS = frozenset({"/", "/docs", "/openapi.json", *(f"/docs/assets/{name}" for name in _ASSETS)})

_PAGE = b"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Foreword</title>
<link rel="stylesheet" href="/docs/assets/swagger-ui.css">
<link rel="icon" type="image/png" href="/docs/assets/favicon-32x32.png">
</head>
<body>
<div id="docs"></div>
<script src="/docs/assets/swagger-ui-bundle.js"></script>
<script>
SwaggerUIBundle({url: "/openapi.json", dom_id: "#docs", deepLinking: true, defaultModelsExpandDepth: 0});
</script>
</body>
</html>
"""


def docs_routes() -> list[HTTPRouteHandler]:
    """Route handlers of the documentation. Nothing is loaded from another host."""
    document = msgspec.json.encode(openapi_document())
    assets = Path(str(swagger_ui_bundle.swagger_ui_path))

    @get("/docs")
    async def docs() -> ASGIResponse:
        return ASGIResponse(body=_PAGE, media_type="text/html")

    @get("/docs/assets/{name:str}", sync_to_thread=True)
    def docs_asset(request: Request) -> ASGIResponse:
        name = request.path_params["name"]
        if name not in _ASSETS:
            raise NotFoundException
        return ASGIResponse(body=(assets / name).read_bytes(), media_type=_ASSETS[name])

    @get("/openapi.json")
    async def openapi_json() -> ASGIResponse:
        return ASGIResponse(body=document)

    @get("/")
    async def root() -> Redirect:
        return Redirect("/docs")

    return [root, docs, docs_asset, openapi_json]
