"""What an engine asks for of a prompt's pictures, and where it comes from.

A request travels without its pictures' pixels. If the engine has no use for them, nobody prepares them; if it has, it
asks for each picture by key, and the answer is a message of megabytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

import msgspec
import numpy as np

from ipc.codec import WireError
from ipc.messages import SupplyFeature
from ipc.vocabulary import RequestError, WantedFeature

from .engine_session import EngineSession

logger = logging.getLogger(__name__)

_RETRY_S = 0.001
_MAX_REASON_CHARS = 500


class FeatureSource(Protocol):
    """Where the inputs of a request's features come from. How many are prepared at a time is its affair."""

    async def inputs(self, key: bytes) -> Mapping[str, np.ndarray]:
        """What `SupplyFeature.inputs` is, of the request's feature `key`. Nobody changes the arrays afterwards.

        May be called several times, also for the same key, and is cancelled when the request is over. What it raises
        ends the request: `FeatureError` with the reason it has, anything else as an error of ours.
        """
        ...


class FeatureError(Exception):
    """There are no inputs of this feature. `error` says why and whose fault it is."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.message)
        self.error = error


class FeatureSupply:
    """Answers what an engine wants, for the requests that are in flight.

    One answer is on its way at a time: what else goes to the engine, and its signs of life, need not wait for all
    pictures of a long chat.

    Attributes:
        num_features: how many were sent with inputs.
        num_bytes: what those inputs weighed.
    """

    def __init__(self) -> None:
        self.num_features = 0
        self.num_bytes = 0
        self._sources: dict[str, FeatureSource] = {}
        self._tasks: dict[str, set[asyncio.Task[None]]] = {}
        self._sending = asyncio.Lock()

    def promise(self, request_id: str, source: FeatureSource) -> None:
        """`source` has whatever will be wanted of this request."""
        self._sources[request_id] = source

    def answer(self, session: EngineSession, wanted: WantedFeature) -> None:
        """See to it that one `SupplyFeature` answers `wanted`, unless its request is forgotten first. Never waits."""
        task = asyncio.create_task(self._answer(session, wanted), name="feature_supply")
        tasks = self._tasks.setdefault(wanted.request_id, set())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def forget(self, request_id: str) -> None:
        """The request is over: nothing more is prepared or sent for it."""
        self._sources.pop(request_id, None)
        for task in self._tasks.pop(request_id, ()):
            task.cancel()

    def forget_all(self) -> None:
        """The session is over."""
        for request_id in [*self._sources, *self._tasks]:
            self.forget(request_id)

    async def _answer(self, session: EngineSession, wanted: WantedFeature) -> None:
        try:
            inputs = _checked(await self._inputs(wanted))
            await self._send(session, SupplyFeature(wanted.request_id, wanted.key, inputs))
        except Exception as error:
            reason = _reason(error)
            if reason.code == "internal":
                logger.warning("feature_inputs_failed request_id=%r", wanted.request_id, exc_info=error)
            await self._send(session, SupplyFeature(wanted.request_id, wanted.key, error=reason))

    async def _inputs(self, wanted: WantedFeature) -> Mapping[str, np.ndarray]:
        if (source := self._sources.get(wanted.request_id)) is None:
            raise FeatureError(RequestError("internal", "the engine wants a picture of a request that came with none"))
        try:
            return await source.inputs(wanted.key)
        except asyncio.CancelledError:
            # Somebody else's: taken for ours, it would leave the engine without an answer.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise FeatureError(RequestError("internal", "the preparation of a picture was given up")) from None

    async def _send(self, session: EngineSession, message: SupplyFeature) -> None:
        """Returns when it has left for the engine. Raises WireError."""
        async with self._sending:
            # Of neither does the socket tell anybody.
            while (delivery := session.send_large(message)) is None:  # noqa: ASYNC110
                await asyncio.sleep(_RETRY_S)
            # Now, since the engine may be done with the request before we look again.
            if message.error is None:
                self.num_features += 1
                self.num_bytes += sum(array.nbytes for array in message.inputs.values())
            while not delivery.done:  # noqa: ASYNC110
                await asyncio.sleep(_RETRY_S)


def _checked(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A copy. Raises TypeError for what is not inputs: it might be sent, but the engine could not read it."""
    for name, array in inputs.items():
        if not isinstance(name, str) or not isinstance(array, np.ndarray):
            raise TypeError(f"inputs are arrays by name, not {type(array).__name__} by {type(name).__name__}")
    return dict(inputs)


def _reason(error: Exception) -> RequestError:
    """Why there are no inputs, in a form that can be sent."""
    if isinstance(error, FeatureError):
        reason = error.error
    elif isinstance(error, WireError) and error.reason == "too_large":
        reason = RequestError("invalid", f"mm_features: a picture's inputs cannot be sent: {error}", "mm_features")
    else:
        reason = RequestError("internal", f"a picture could not be prepared: {type(error).__name__}: {error}")
    message = reason.message[:_MAX_REASON_CHARS].encode(errors="replace").decode()
    return msgspec.structs.replace(reason, message=message)
