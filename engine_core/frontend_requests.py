"""Whose request is which: every frontend has ids of its own, the engine one set for all.

What an engine says of its requests becomes one share per frontend here, in that frontend's ids.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from ipc.vocabulary import EngineRequest, RequestError, RequestOutput, WantedFeature

from .errors import InvalidRequestError
from .frontend_session import FrontendSession
from .request import Request

logger = logging.getLogger(__name__)

_MAX_REQUEST_ID_BYTES = 256
_MAX_REASON_CHARS = 500


@dataclass(slots=True)
class _Entry:
    """`wanted` are the keys of features whose inputs the frontend was asked for and has not sent."""

    frontend: FrontendSession
    own_id: str
    wanted: set[bytes] = field(default_factory=set)


class FrontendRequests:
    """The unfinished requests of all frontends by the engine's id, unique over all frontends and times.

    The way back, from a frontend's id, is `FrontendSession.engine_ids`; both are changed here only.
    """

    def __init__(self, prepare_request: Callable[[EngineRequest], Request]) -> None:
        """`prepare_request`: as `EngineCore.prepare_request`."""
        self._prepare_request = prepare_request
        self._serial = itertools.count()
        self._entries: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def admit(self, frontend: FrontendSession, request: EngineRequest) -> Request | RequestError:
        """The request, checked, hashed and under an id of the engine's; or why it will not be computed."""
        own_id = request.request_id
        if (num_bytes := len(own_id.encode())) > _MAX_REQUEST_ID_BYTES:
            message = f"request_id: has {num_bytes} bytes, at most {_MAX_REQUEST_ID_BYTES} are allowed"
            return RequestError("invalid", message, "request_id")
        if own_id in frontend.engine_ids:
            return RequestError("invalid", "request_id: belongs to an unfinished request", "request_id")
        engine_id = f"{next(self._serial)}:{own_id}"
        prepared = self.prepare(msgspec.structs.replace(request, request_id=engine_id))
        if isinstance(prepared, Request):
            frontend.engine_ids[own_id] = engine_id
            self._entries[engine_id] = _Entry(frontend, own_id)
        return prepared

    def prepare(self, request: EngineRequest) -> Request | RequestError:
        """The request, checked and hashed, not to be computed; or why it could not be."""
        try:
            return self._prepare_request(request)
        except InvalidRequestError as error:
            return RequestError("invalid", str(error), error.param)
        except Exception as error:
            logger.exception("prepare_failed request_id=%.300r", request.request_id)
            message = f"the request could not be prepared: {type(error).__name__}: {error}"
            return RequestError("internal", message[:_MAX_REASON_CHARS])

    def remove(self, frontend: FrontendSession, own_ids: Iterable[str]) -> list[str]:
        """The engine's ids of those that were unfinished."""
        engine_ids = [frontend.engine_ids.pop(own_id) for own_id in own_ids if own_id in frontend.engine_ids]
        for engine_id in engine_ids:
            del self._entries[engine_id]
        return engine_ids

    def shares_of_outputs(self, outputs: Iterable[RequestOutput]) -> dict[FrontendSession, list[RequestOutput]]:
        """Who gets which outputs. They are renamed, not copied; requests that end with them are removed."""
        shares: dict[FrontendSession, list[RequestOutput]] = {}
        for output in outputs:
            # Unknown is what was aborted while its step ran.
            if (entry := self._entries.get(output.request_id)) is None:
                continue
            if output.ends_request:
                self.remove(entry.frontend, [entry.own_id])
            output.request_id = entry.own_id
            shares.setdefault(entry.frontend, []).append(output)
        return shares

    def shares_of_wanted(self, wanted: Iterable[WantedFeature]) -> dict[FrontendSession, list[WantedFeature]]:
        """Who is to be asked for which features. From here on each of them may be supplied, once."""
        shares: dict[FrontendSession, list[WantedFeature]] = {}
        for feature in wanted:
            if (entry := self._entries.get(feature.request_id)) is None:
                continue
            entry.wanted.add(feature.key)
            shares.setdefault(entry.frontend, []).append(WantedFeature(entry.own_id, feature.key))
        return shares

    def accept_supply(self, engine_id: str, key: bytes) -> bool:
        """Whether this feature of this unfinished request was asked for and has not come yet."""
        wanted = self._entries[engine_id].wanted
        if key not in wanted:
            return False
        wanted.remove(key)
        return True
