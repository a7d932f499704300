"""`POST /reset_prefix_cache`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from litestar import Request, post
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse

from .engine_client import EngineClient
from .engine_errors import EngineUnavailableError
from .errors import invalid_request, unavailable
from .request_body import read_body
from .request_decode import decode_body

# A step of any length comes first; whoever asks should hear something before proxies give up.
_RESET_TIMEOUT_S = 30.0

_FLAGS = {"true": True, "1": True, "false": False, "0": False}


class ResetRequest(msgspec.Struct, forbid_unknown_fields=True):
    """May also come in the query. `reset_running_requests`: preempt what runs; it is computed again."""

    reset_running_requests: bool = False


class ResetAnswer(msgspec.Struct):
    """How many cached KV blocks were forgotten, all engines together."""

    num_dropped_blocks: int


_decode = msgspec.json.Decoder(ResetRequest)


def cache_routes(engines: Sequence[EngineClient]) -> list[HTTPRouteHandler]:
    """Route handlers that control the prefix caches of `engines`."""

    @post("/reset_prefix_cache", status_code=200)
    async def reset_prefix_cache(request: Request) -> ASGIResponse:
        body = await read_body(request)
        asked = decode_body(_decode, body) if body else ResetRequest()
        reset_running_requests = _flag(request.query_params, "reset_running_requests", asked.reset_running_requests)
        answer = await _reset(engines, reset_running_requests)
        return ASGIResponse(body=msgspec.json.encode(answer))

    return [reset_prefix_cache]


def _flag(query: Any, name: str, default: bool) -> bool:
    value = query.get(name)
    if value is None:
        return default
    if value.lower() not in _FLAGS:
        raise invalid_request(f"{name} is {value!r}; it must be true or false", name)
    return _FLAGS[value.lower()]


async def _reset(engines: Sequence[EngineClient], reset_running_requests: bool) -> ResetAnswer:
    """Raises ApiError (503) without an engine."""
    if any(engine.state != "ready" for engine in engines):
        raise unavailable("its prefix cache cannot be reset")
    try:
        results = await asyncio.gather(
            *(
                engine.reset_prefix_cache(reset_running_requests=reset_running_requests, timeout_s=_RESET_TIMEOUT_S)
                for engine in engines
            )
        )
    except EngineUnavailableError as error:
        raise unavailable(str(error)) from error
    return ResetAnswer(sum(result.num_dropped_blocks for result in results))
