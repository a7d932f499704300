"""The HTTP application: every route, every error, nothing about processes."""

from __future__ import annotations

import logging
from http import HTTPStatus

from litestar import Litestar, Request, Response
from litestar.exceptions import HTTPException

from frontend.openai.routes import error_response, openai_routes
from frontend.openai.serving import Serving

from .docs import docs_routes
from .errors import ApiError, ClientDisconnectedError, internal_error
from .health import health_routes
from .http_config import DEFAULT_MAX_BODY_BYTES

logger = logging.getLogger(__name__)


def create_app(serving: Serving, *, max_body_bytes: int = DEFAULT_MAX_BODY_BYTES) -> Litestar:
    """The application that answers from `serving`. It neither starts nor closes what `serving` holds.

    Every answer that is not the one asked for, an unknown path included, has the OpenAI API's error body.
    """
    return Litestar(
        route_handlers=[*openai_routes(serving), *health_routes(serving.client), *docs_routes()],
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


def _api_error(_: Request, error: ApiError) -> Response[bytes]:
    return error_response(error)


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
    response = error_response(ApiError(status, messages.get(status, error.detail), kind=kind, code=code))
    response.headers.update(error.headers or {})
    return response


def _unexpected_error(request: Request, error: Exception) -> Response[bytes]:
    logger.error("request_failed path=%s", request.url.path, exc_info=error)
    return error_response(internal_error("the server failed; its log says why"))
