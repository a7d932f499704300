"""What a client is told when something is wrong, whatever API it speaks."""

from __future__ import annotations


class ApiError(Exception):
    """An answer other than the one asked for.

    `param` is the request's field at fault, spelled as a path (`messages[0].role`); `code` a word programs can
    test. `retry_after_s` is set where trying again may help.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


class ClientDisconnectedError(Exception):
    """Nobody is left to answer."""


def invalid_request(message: str, param: str | None, code: str | None = None) -> ApiError:
    """400: the request can never succeed as it is."""
    return ApiError(400, message, kind="invalid_request_error", param=param, code=code)


def model_not_found(message: str) -> ApiError:
    """404: nothing is served under the name that the request asks for."""
    return ApiError(404, message, kind="invalid_request_error", param="model", code="model_not_found")


def not_supported(param: str, what: str) -> ApiError:
    """400: the request is right, but asks for something this server does not do."""
    return invalid_request(f"{what} is not supported yet", param, "unsupported_parameter")


def unavailable(reason: str) -> ApiError:
    """503: there is no engine right now, or it was lost on the way."""
    return ApiError(
        503,
        f"the engine is not available: {reason}",
        kind="service_unavailable_error",
        code="engine_unavailable",
        retry_after_s=1,
    )


def shutting_down() -> ApiError:
    """503: this server is about to end. Another may take its place."""
    return ApiError(
        503,
        "the server is shutting down",
        kind="service_unavailable_error",
        code="shutting_down",
        retry_after_s=1,
    )


def overloaded(reason: str, retry_after_s: int = 1) -> ApiError:
    """503: too much to do."""
    return ApiError(
        503,
        f"the server is overloaded: {reason}",
        kind="service_unavailable_error",
        code="overloaded",
        retry_after_s=retry_after_s,
    )


def internal_error(reason: str) -> ApiError:
    """500: our fault."""
    return ApiError(500, reason, kind="server_error", code="internal_error")
