"""The HTTP application: every route, every error, nothing about processes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from http import HTTPStatus

from litestar import Litestar, MediaType, Request, Response
from litestar.exceptions import HTTPException
from litestar.response.base import ASGIResponse
from litestar.types import ASGIApp, Receive, Scope, Send

from frontend.anthropic.routes import anthropic_routes, error_answer, is_anthropic
from frontend.openai.responses import encode_error
from frontend.openai.routes import openai_routes

from .adapter_routes import adapter_routes
from .api_key import WATCHED_PATHS, ApiKeyGuard, unauthorized
from .cache_routes import cache_routes
from .docs import DOCS_PATHS, docs_routes
from .errors import ApiError, ClientDisconnectedError, internal_error
from .explain.routes import explain_routes
from .health import health_routes
from .http_config import DEFAULT_MAX_BODY_BYTES
from .metrics.routes import metrics_routes
from .request_body import discard_body
from .serving import Serving

logger = logging.getLogger(__name__)


def create_app(
    serving: Serving,
    *,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    api_keys: Sequence[str] = (),
    admin_api_keys: Sequence[str] = (),
) -> ASGIApp:
    """The application that answers from `serving`. It neither starts nor closes what `serving` holds.

    Every answer that is not the one asked for, an unknown path included, has the OpenAI API's error body, below
    `/v1/messages` the Anthropic API's. With `api_keys`, whoever has none of them or of `admin_api_keys` is answered
    401, but at `api_key.WATCHED_PATHS` and `docs.DOCS_PATHS`. Who has none of `admin_api_keys` may neither reset the
    cache of all nor load or unload adapters, if there are any or if clients are kept apart by their keys.
    """
    app = Litestar(
        route_handlers=[
            *openai_routes(serving),
            *anthropic_routes(serving),
            *health_routes(serving.client),
            *metrics_routes(serving.metrics),
            *cache_routes(serving.client.engines),
            *adapter_routes(serving),
            *explain_routes(serving, num_callers=len({*api_keys, *admin_api_keys})),
            *docs_routes(),
        ],
        openapi_config=None,
        request_max_body_size=max_body_bytes,
        exception_handlers={
            ApiError: _api_error,
            ClientDisconnectedError: _nobody_left,
            HTTPException: _http_error,
            Exception: _unexpected_error,
        },
        logging_config=None,
    )
    # Around everything: the framework's middleware does not see paths that do not exist.
    if not (api_keys or admin_api_keys):
        return app
    # Clients that are kept apart by their keys do not trust each other.
    all_administer = serving.isolation != "api-key"
    return ApiKeyGuard(
        app,
        api_keys,
        admin_api_keys,
        _unauthorized,
        open_paths=WATCHED_PATHS | DOCS_PATHS,
        all_administer=all_administer,
    )


async def _unauthorized(scope: Scope, receive: Receive, send: Send) -> None:
    if all(name != b"expect" for name, _ in scope["headers"]):
        await discard_body(receive)
    error = unauthorized()
    body, headers = _in_its_shape(scope, error)
    headers["www-authenticate"] = "Bearer"
    answer = ASGIResponse(body=body, status_code=error.status, media_type=MediaType.JSON, headers=headers)
    await answer(scope, receive, send)


def _in_its_shape(scope: Scope, error: ApiError) -> tuple[bytes, dict[str, str]]:
    """Body and headers of the answer that tells about `error`, as the API has them that was asked."""
    body, headers = error_answer(scope, error) if is_anthropic(scope["path"]) else (encode_error(error), {})
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    return body, headers


def _api_error(request: Request, error: ApiError) -> Response[bytes]:
    body, headers = _in_its_shape(request.scope, error)
    return Response(body, status_code=error.status, headers=headers, media_type=MediaType.JSON)


def _nobody_left(_: Request, __: ClientDisconnectedError) -> Response[bytes]:
    # Something must be returned; the server drops it.
    return Response(b"", status_code=499)


def _http_error(request: Request, error: HTTPException) -> Response[bytes]:
    """What the framework refuses: unknown paths, wrong methods, bodies that are too large or break off."""
    status = HTTPStatus(error.status_code)
    messages = {
        HTTPStatus.NOT_FOUND: f"there is no {request.url.path} here; /docs lists what there is",
        HTTPStatus.METHOD_NOT_ALLOWED: f"{request.url.path} does not take {request.method}",
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "the request's body is larger than"
        f" {request.app.request_max_body_size} bytes, the most this server reads",
    }
    kind = "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    code = status.phrase.lower().replace(" ", "_")
    response = _api_error(request, ApiError(status, messages.get(status, error.detail), kind=kind, code=code))
    response.headers.update(error.headers or {})
    return response


def _unexpected_error(request: Request, error: Exception) -> Response[bytes]:
    logger.error("request_failed path=%s", request.url.path, exc_info=error)
    return _api_error(request, internal_error("the server failed; its log says why"))
