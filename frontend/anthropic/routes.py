"""The Anthropic API's routes, and what they say of errors."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator

import msgspec
from litestar import Request, post
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse
from litestar.types import Scope

from frontend.api_key import caller_of
from frontend.cache_header import cache_headers
from frontend.errors import ApiError
from frontend.prepared import TokenCounts
from frontend.request_body import read_body
from frontend.request_decode import decode_body
from frontend.serving import Serving
from frontend.streaming import EventStream, event, unless_disconnected

from .messages import answer_message, stream_message
from .prepare import count_tokens, prepare_message
from .protocol import CountTokensRequest, MessagesRequest
from .responses import TokenCount, encode_error

_PATH = "/v1/messages"
_REQUEST_ID = "foreword_request_id"  # in the state of a request's scope

_decode_message = msgspec.json.Decoder(MessagesRequest)
_decode_count = msgspec.json.Decoder(CountTokensRequest)


def anthropic_routes(serving: Serving) -> list[HTTPRouteHandler]:
    """Route handlers that answer from `serving`."""

    @post(_PATH, status_code=200)
    async def messages(request: Request) -> ASGIResponse:
        asked = decode_body(_decode_message, await read_body(request))
        return await _respond(serving, request, asked)

    @post(f"{_PATH}/count_tokens", status_code=200)
    async def count(request: Request) -> ASGIResponse:
        asked = decode_body(_decode_count, await read_body(request))
        num_tokens = await unless_disconnected(request.receive, count_tokens(serving, asked, caller_of(request)))
        headers = {"request-id": _request_id(request.scope)}
        return ASGIResponse(body=msgspec.json.encode(TokenCount(num_tokens)), headers=headers)

    return [messages, count]


async def _respond(serving: Serving, request: Request, asked: MessagesRequest) -> ASGIResponse:
    request_id = _request_id(request.scope)
    answer_id = request_id.replace("req_", "msg_", 1)

    async def begin() -> tuple[TokenCounts, str, bytes, AsyncGenerator[bytes] | None]:
        """The whole answer, or its first event and the others."""
        message = await prepare_message(serving, asked, caller_of(request))
        counts, tenant = TokenCounts(message.prepared), message.prepared.tenant
        if not asked.stream:
            return counts, tenant, await answer_message(serving, message, counts, answer_id), None
        events = stream_message(serving, message, counts, answer_id)
        return counts, tenant, await anext(events), events

    # Until here nothing was sent: what is found to be wrong by the first token still gets its status.
    counts, tenant, body, events = await unless_disconnected(request.receive, begin())
    headers = {"request-id": request_id, **cache_headers(counts, serving.tenant_label(tenant))}
    if events is None:
        return ASGIResponse(body=body, headers=headers)
    return EventStream(
        body, events, error_event=lambda error: event(encode_error(error, request_id), b"error"), headers=headers
    )


def is_anthropic(path: str) -> bool:
    """Whether whoever asks for `path` expects errors as this API has them."""
    return path == _PATH or path.startswith(f"{_PATH}/")


def error_answer(scope: Scope, error: ApiError) -> tuple[bytes, dict[str, str]]:
    """Body and headers that tell whoever sent a request to this API about `error`."""
    request_id = _request_id(scope)
    return encode_error(error, request_id), {"request-id": request_id}


def _request_id(scope: Scope) -> str:
    """The same whenever it is asked for."""
    return scope.setdefault("state", {}).setdefault(_REQUEST_ID, f"req_{uuid.uuid4().hex}")
