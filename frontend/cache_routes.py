"""`POST /reset_prefix_cache`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from litestar import Request, post
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse

from frontend.openai.responses import ErrorDetails, error_details

from .api_key import check_may_administer
from .engine_client import EngineClient
from .engine_errors import EngineUnavailableError
from .engine_pool import reason_for_clients
from .errors import invalid_request, unavailable
from .request_body import read_body
from .request_decode import decode_body

# A step of any length comes first; whoever asks should hear something before proxies give up.
_RESET_TIMEOUT_S = 30.0

_FLAGS = {"true": True, "1": True, "false": False, "0": False}


class ResetRequest(msgspec.Struct, forbid_unknown_fields=True):
    """May also come in the query. `reset_running_requests`: preempt what runs; it is computed again."""

    reset_running_requests: bool = False


class TierReset(msgspec.Struct):
    """What became of one tier of an engine's cache, in KV blocks (`device`) or pictures (`encoder`).

    `dropped` were cached. `kept` are not free yet: `why_kept` says what for, and whether anybody finds them.
    """

    dropped: int
    kept: int
    why_kept: str | None


class EngineReset(msgspec.Struct):
    """`why_not` is null exactly if the engine has forgotten its cache; else nothing is known of its `tiers`."""

    engine: int
    why_not: str | None = None
    tiers: dict[str, TierReset] = {}


class ResetAnswer(msgspec.Struct):
    """How many cached KV blocks were forgotten, all engines together, and what each engine did.

    `error` comes with a status of 503: not all of them have forgotten everything.
    """

    num_dropped_blocks: int
    engines: list[EngineReset]
    error: ErrorDetails | msgspec.UnsetType = msgspec.UNSET


_decode = msgspec.json.Decoder(ResetRequest)


def cache_routes(engines: Sequence[EngineClient]) -> list[HTTPRouteHandler]:
    """Route handlers that control the prefix caches of `engines`."""

    @post("/reset_prefix_cache", status_code=200)
    async def reset_prefix_cache(request: Request) -> ASGIResponse:
        check_may_administer(request)
        body = await read_body(request)
        asked = decode_body(_decode, body) if body else ResetRequest()
        reset_running_requests = _flag(request.query_params, "reset_running_requests", asked.reset_running_requests)
        results = await asyncio.gather(*(_reset(engine, reset_running_requests) for engine in engines))
        answer = _answer(results)
        if answer.error is msgspec.UNSET:
            return ASGIResponse(body=msgspec.json.encode(answer))
        return ASGIResponse(body=msgspec.json.encode(answer), status_code=503, headers={"retry-after": "1"})

    return [reset_prefix_cache]


def _flag(query: Any, name: str, default: bool) -> bool:
    value = query.get(name)
    if value is None:
        return default
    if value.lower() not in _FLAGS:
        raise invalid_request(f"{name} is {value!r}; it must be true or false", name)
    return _FLAGS[value.lower()]


async def _reset(engine: EngineClient, reset_running_requests: bool) -> EngineReset:
    """Of an engine that cannot be reached, why it cannot."""
    try:
        result = await engine.calls.reset_prefix_cache(
            reset_running_requests=reset_running_requests, timeout_s=_RESET_TIMEOUT_S
        )
    except EngineUnavailableError as error:
        return EngineReset(engine.index, why_not=str(error) if engine.is_connected else reason_for_clients(engine))
    users = f"{result.num_requests_in_use} running request{'s' if result.num_requests_in_use != 1 else ''}"
    device = TierReset(
        result.num_dropped_blocks,
        result.num_blocks_in_use,
        f"{users} computed or found them before; nobody else finds them" if result.num_blocks_in_use else None,
    )
    encoder = TierReset(
        result.num_dropped_features,
        result.num_features_in_use,
        "running requests need them; until those end others find them, too" if result.num_features_in_use else None,
    )
    return EngineReset(engine.index, tiers={"device": device, "encoder": encoder})


def _answer(results: Sequence[EngineReset]) -> ResetAnswer:
    """Who must be sure that nothing is found any more looks at the status: an engine that is away has its cache."""
    answer = ResetAnswer(sum(result.tiers["device"].dropped for result in results if result.tiers), list(results))
    away = [result for result in results if result.why_not is not None]
    if away:
        reasons = "; ".join(f"engine {result.engine}: {result.why_not}" for result in away)
        error = unavailable(f"{len(away)} of {len(results)} have not forgotten their prefix cache: {reasons}")
        answer.error = error_details(error)
    return answer
