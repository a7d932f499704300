"""One question to every engine: what would this request find?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from frontend.engine_client import EngineClient
from frontend.engine_errors import EngineUnavailableError, RequestRefusedError
from frontend.engine_pool import EnginePool, reason_for_clients
from ipc.vocabulary import CacheProbe, EngineRequest

# A step of any length comes first; whoever asks should hear something before proxies give up.
_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class EngineProbe:
    """What the engine with this index said, or why it said nothing."""

    engine: int
    probe: CacheProbe | None = None
    error: EngineUnavailableError | RequestRefusedError | None = None


async def ask_engines(
    pool: EnginePool,
    request: EngineRequest,
    *,
    engine: int | None = None,
    explain: bool = False,
    relative_end: int = 0,
) -> list[EngineProbe]:
    """What each of them said, in their order; or only the one with the index `engine`.

    Raises:
        EngineUnavailableError: none is there, or none answered in time.
        RequestRefusedError: the request can run on none of those that are there.
    """
    asked = [each for each in pool.engines if engine in (None, each.index)]
    probes = await asyncio.gather(*(_ask(pool, each, request, explain, relative_end) for each in asked))
    errors = [probe.error for probe in probes if probe.error is not None]
    if len(errors) == len(probes):
        raise next((error for error in errors if isinstance(error, RequestRefusedError)), errors[0])
    return probes


async def _ask(
    pool: EnginePool, engine: EngineClient, request: EngineRequest, explain: bool, relative_end: int
) -> EngineProbe:
    if not engine.is_connected:
        return EngineProbe(engine.index, error=EngineUnavailableError(reason_for_clients(engine)))
    if not pool.adapters.has(engine, request.adapter):
        return EngineProbe(
            engine.index, error=EngineUnavailableError(f"it does not have the adapter '{request.adapter}' now")
        )
    try:
        probe = await engine.calls.probe_cache(
            request, explain=explain, relative_end=relative_end, timeout_s=_TIMEOUT_S
        )
    except (EngineUnavailableError, RequestRefusedError) as error:
        return EngineProbe(engine.index, error=error)
    return EngineProbe(engine.index, probe)


def best_of(probes: Sequence[EngineProbe]) -> tuple[int, CacheProbe]:
    """The engine that has most of the request, the first of equals, and what it has. At least one has answered."""
    answered = [(probe.engine, probe.probe) for probe in probes if probe.probe is not None]
    return max(answered, key=lambda item: item[1].num_hit_tokens)
