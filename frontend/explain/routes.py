"""`POST /v1/cache/probe` and `/v1/cache/explain`: the bodies of chats and completions, which are not run."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import msgspec
from litestar import Request, post
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse
from msgspec import UNSET, Raw, UnsetType

from frontend.api_key import caller_of
from frontend.errors import invalid_request
from frontend.openai.prepare import asked_chat, find_places, prepare_chat, prepare_completion
from frontend.openai.protocol import ChatCompletionRequest, CompletionRequest
from frontend.openai.refusals import field_names
from frontend.prepared import PreparedRequest
from frontend.prompt.places import Place, TokenRange
from frontend.refusals import client_errors
from frontend.request_body import read_body
from frontend.request_decode import decode_body
from frontend.serving import Serving
from frontend.streaming import unless_disconnected

from .answers import ExplainAnswer, ProbeAnswer
from .explaining import AskedChat, explain, probe


class _Kind(msgspec.Struct):
    """What tells a completion's body from a chat's."""

    prompt: Raw | UnsetType = UNSET
    messages: Raw | UnsetType = UNSET


_decode_kind = msgspec.json.Decoder(_Kind)
_decode_chat = msgspec.json.Decoder(ChatCompletionRequest)
_decode_completion = msgspec.json.Decoder(CompletionRequest)


def explain_routes(serving: Serving, *, num_callers: int) -> list[HTTPRouteHandler]:
    """Route handlers that ask the engines of `serving`.

    With more than one of `num_callers`, the API keys, the text of a relative is shown only where a salt covers it: what
    anybody may find may be anybody's.
    """

    @post("/v1/cache/probe", status_code=200)
    async def probe_route(request: Request) -> ASGIResponse:
        asked = _decode(await read_body(request))

        async def answer() -> ProbeAnswer:
            prepared = await _prepare(serving, asked, caller_of(request))
            with client_errors(serving, field_names(asked)):
                return await probe(serving, prepared)

        return await _respond(request, answer())

    @post("/v1/cache/explain", status_code=200)
    async def explain_route(request: Request) -> ASGIResponse:
        asked = _decode(await read_body(request))

        async def answer() -> ExplainAnswer:
            caller = caller_of(request)
            prepared = await _prepare(serving, asked, caller)
            with client_errors(serving, field_names(asked)):
                chat = _chat_of(serving, asked, caller)
                return await explain(serving, prepared, chat, shows_shared=num_callers <= 1)

        return await _respond(request, answer())

    return [probe_route, explain_route]


def _decode(body: bytes) -> ChatCompletionRequest | CompletionRequest:
    kind = decode_body(_decode_kind, body)
    if kind.prompt is not UNSET and kind.messages is UNSET:
        return decode_body(_decode_completion, body)
    return decode_body(_decode_chat, body)


async def _prepare(serving: Serving, asked: ChatCompletionRequest | CompletionRequest, caller: str) -> PreparedRequest:
    """With one prompt. Raises ApiError."""
    if isinstance(asked, ChatCompletionRequest):
        return await prepare_chat(serving, asked, caller)
    prepared = await prepare_completion(serving, asked, caller)
    if len(prepared.prompts) > 1:
        raise invalid_request(f"prompt holds {len(prepared.prompts)} prompts; here it must be one", "prompt")
    return prepared


def _chat_of(serving: Serving, asked: ChatCompletionRequest | CompletionRequest, caller: str) -> AskedChat | None:
    if not isinstance(asked, ChatCompletionRequest):
        return None

    async def find(places: Sequence[Place]) -> Mapping[Place, TokenRange]:
        return await find_places(serving, asked, caller, places)

    return AskedChat(asked_chat(serving, asked), find)


async def _respond(request: Request, answer: Coroutine[Any, Any, ProbeAnswer | ExplainAnswer]) -> ASGIResponse:
    return ASGIResponse(body=msgspec.json.encode(await unless_disconnected(request.receive, answer)))
