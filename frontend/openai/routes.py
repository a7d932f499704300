"""The OpenAI API's routes."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from litestar import Request, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse

from frontend.api_key import caller_of
from frontend.cache_header import cache_headers
from frontend.prepared import PreparedRequest, TokenCounts
from frontend.request_body import read_body
from frontend.request_decode import decode_body
from frontend.serving import Serving
from frontend.streaming import EventStream, event, unless_disconnected

from .chat import answer_chat, stream_chat
from .completions import answer_completion, stream_completion
from .prepare import prepare_chat, prepare_completion
from .protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from .responses import ModelCard, ModelList, encode_error
from .tokenize import detokenize, tokenize

R = TypeVar("R", ChatCompletionRequest, CompletionRequest)


@dataclass(frozen=True, slots=True)
class _Endpoint(Generic[R]):
    """How requests of one kind are answered, whole and streamed, once they are prepared."""

    id_prefix: str
    prepare: Callable[[Serving, R, str], Coroutine[Any, Any, PreparedRequest]]
    answer: Callable[[Serving, R, PreparedRequest, TokenCounts, str], Coroutine[Any, Any, bytes]]
    stream: Callable[[Serving, R, PreparedRequest, TokenCounts, str], AsyncGenerator[bytes]]


_CHAT = _Endpoint("chatcmpl", prepare_chat, answer_chat, stream_chat)
_COMPLETION = _Endpoint("cmpl", prepare_completion, answer_completion, stream_completion)

_decode_chat = msgspec.json.Decoder(ChatCompletionRequest)
_decode_completion = msgspec.json.Decoder(CompletionRequest)
_decode_tokenize = msgspec.json.Decoder(TokenizeRequest)
_decode_detokenize = msgspec.json.Decoder(DetokenizeRequest)


def openai_routes(serving: Serving) -> list[HTTPRouteHandler]:
    """Route handlers that answer from `serving`."""

    @post("/v1/chat/completions", status_code=200)
    async def chat_completions(request: Request) -> ASGIResponse:
        asked = decode_body(_decode_chat, await read_body(request))
        return await _respond(serving, request, asked, _CHAT)

    @post("/v1/completions", status_code=200)
    async def completions(request: Request) -> ASGIResponse:
        asked = decode_body(_decode_completion, await read_body(request))
        return await _respond(serving, request, asked, _COMPLETION)

    @post("/tokenize", status_code=200)
    async def tokenize_route(request: Request) -> ASGIResponse:
        asked = decode_body(_decode_tokenize, await read_body(request))
        return ASGIResponse(
            body=await unless_disconnected(request.receive, tokenize(serving, asked, caller_of(request)))
        )

    @post("/detokenize", status_code=200)
    async def detokenize_route(request: Request) -> ASGIResponse:
        asked = decode_body(_decode_detokenize, await read_body(request))
        return ASGIResponse(body=await unless_disconnected(request.receive, detokenize(serving, asked)))

    @get("/v1/models")
    async def models() -> ASGIResponse:
        return _json(ModelList([_card(serving, name) for name in serving.model.served_names]))

    @get("/v1/models/{model_id:path}")
    async def model(request: Request) -> ASGIResponse:
        # A path, since the names of models have slashes in them.
        return _json(_card(serving, serving.model.check(request.path_params["model_id"].removeprefix("/"))))

    return [chat_completions, completions, tokenize_route, detokenize_route, models, model]


async def _respond(serving: Serving, request: Request, asked: R, endpoint: _Endpoint[R]) -> ASGIResponse:
    answer_id = f"{endpoint.id_prefix}-{uuid.uuid4().hex}"

    async def begin() -> tuple[PreparedRequest, TokenCounts, bytes, AsyncGenerator[bytes] | None]:
        """The whole answer, or its first event and the others."""
        prepared = await endpoint.prepare(serving, asked, caller_of(request))
        counts = TokenCounts(prepared)
        if not asked.stream:
            return prepared, counts, await endpoint.answer(serving, asked, prepared, counts, answer_id), None
        events = endpoint.stream(serving, asked, prepared, counts, answer_id)
        return prepared, counts, await anext(events), events

    # Until here nothing was sent: what is found to be wrong by the first token still gets its status.
    prepared, counts, body, events = await unless_disconnected(request.receive, begin())
    headers = {"x-request-id": answer_id, **cache_headers(counts, serving.tenant_label(prepared.tenant))}
    if events is None:
        return ASGIResponse(body=body, headers=headers)
    return EventStream(body, events, error_event=lambda error: event(encode_error(error)), headers=headers)


def _card(serving: Serving, name: str) -> ModelCard:
    model, capabilities = serving.model, serving.client.capabilities
    max_model_len = capabilities.max_model_len if capabilities else None
    if not model.adapter_of(name):
        return ModelCard(name, model.created_s, max_model_len)
    adapter = model.adapters[name]
    return ModelCard(name, int(adapter.loaded_s), max_model_len, root=adapter.path, parent=model.names[0])


def _json(value: msgspec.Struct) -> ASGIResponse:
    return ASGIResponse(body=msgspec.json.encode(value))
