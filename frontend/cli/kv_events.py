"""`--kv-events-config`: whether and where an engine publishes what its prefix cache gains and loses."""

from __future__ import annotations

import msgspec
import typer

from engine_core.config import KVEventsConfig
from ipc.sockets import check_listenable


def published_kv_events(text: str | KVEventsConfig) -> KVEventsConfig:
    """Parser: JSON with the fields of `KVEventsConfig`, of endpoints that can be used.

    What is recorded has to be published: in an engine process there is nobody else to take it.
    """
    try:
        config = msgspec.json.decode(text, type=KVEventsConfig) if isinstance(text, str) else text
        config.check_is_published()
        # To say so before minutes of loading.
        for endpoint in (config.endpoint if config.binds else None, config.replay_endpoint):
            if config.enable_kv_cache_events and endpoint is not None:
                check_listenable(endpoint, insecure=True)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    return config
