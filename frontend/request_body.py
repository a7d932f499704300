"""Reading a request's body, and refusing one so that its sender sees the answer."""

from __future__ import annotations

from litestar import Request
from litestar.exceptions.http_exceptions import RequestEntityTooLarge
from litestar.types import Receive

from .errors import ApiError

_MAX_DISCARDED_BYTES = 1 << 30


async def read_body(request: Request) -> bytes:
    """The whole body.

    Raises:
        ApiError: (415) it is compressed.
        RequestEntityTooLarge: it is larger than the application allows.
    """
    try:
        encoding = request.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise ApiError(
                415,
                f"content-encoding '{encoding}' is not supported; send the body as it is, without this header",
                kind="invalid_request_error",
                code="unsupported_content_encoding",
            )
        return await request.body()
    except (ApiError, RequestEntityTooLarge):
        # Who asked whether to send it (`Expect: 100-continue`) is answered at once.
        if "expect" not in request.headers:
            await discard_body(request.receive)
        raise


async def discard_body(receive: Receive) -> None:
    """Let a client finish sending: many read no answer before, and would see a broken connection instead of it."""
    num_bytes = 0
    while num_bytes < _MAX_DISCARDED_BYTES:
        message = await receive()
        if message["type"] != "http.request" or not message["more_body"]:
            return
        num_bytes += len(message["body"])
