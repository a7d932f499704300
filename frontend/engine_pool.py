"""Several engines of one model behind the face of one: each request goes to the one with the least to do.

A request whose engine is lost, stops or has too long a queue before its first output is tried once more on another
engine: nothing of it was seen by anybody. Afterwards it fails as it would with a single engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from engine_core import tokenizer_digest
from ipc.curve import FrontendKeys
from ipc.key_files import load_key_pair, load_public_key
from ipc.vocabulary import EngineCapabilities, EngineRequest, RequestError, RequestOutput

from .engine_client import EngineClient, capabilities_of
from .engine_errors import EngineUnavailableError, RequestRefusedError
from .feature_supply import FeatureSource
from .http_config import HttpConfig
from .pooled_adapters import PooledAdapters
from .request_stream import RequestStream


class EnginePool:
    """One or several engines. Use from one event loop.

    Attributes:
        engines: in the order in which they were named. Of equally busy ones the first is chosen: it is the one whose
            cache knows more.
        adapters: LoRA adapters, which an engine must have to be chosen for requests that ask for them.
    """

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        self.engines = engines
        self.adapters = PooledAdapters(engines)

    @property
    def state(self) -> Literal["connecting", "ready", "draining", "down"]:
        """`ready` if any engine is; else the best that can be said of any of them."""
        states = {engine.state for engine in self.engines}
        return next((state for state in ("ready", "draining", "connecting") if state in states), "down")

    @property
    def down_reason(self) -> str | None:
        """Why the state is not `ready`, for clients; None when it is."""
        if self.state == "ready":
            return None
        if len(self.engines) == 1:
            return reason_for_clients(self.engines[0])
        return "; ".join(f"engine {engine.index}: {reason_for_clients(engine)}" for engine in self.engines)

    @property
    def capabilities(self) -> EngineCapabilities | None:
        """Of the ready engine that takes the longest requests; without one, of any that answered; None before."""
        known = [engine for engine in self.engines if engine.capabilities is not None]
        engines = [engine for engine in known if engine.state == "ready"] or known
        return max((capabilities_of(engine) for engine in engines), key=lambda c: c.max_model_len, default=None)

    @property
    def num_in_flight(self) -> int:
        """Requests submitted and neither finished, failed nor aborted."""
        return sum(engine.num_in_flight for engine in self.engines)

    async def start(self) -> None:
        """Begin looking for the engines. Returns at once."""
        for engine in self.engines:
            await engine.start()

    async def close(self) -> None:
        """Say goodbye, fail what is in flight and release the sockets. Idempotent."""
        await self.adapters.close()
        await asyncio.gather(*(engine.close() for engine in self.engines))

    async def wait_ready(self) -> None:
        """Return when an engine is ready."""
        waits = [asyncio.create_task(engine.wait_ready()) for engine in self.engines]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def submit(self, request: EngineRequest, features: FeatureSource | None = None) -> PooledStream:
        """Send `request` to an engine. Never blocks. Enter the stream at once: `async with pool.submit(r) as stream:`.

        `features` has the inputs of its `mm_features`, whichever engine wants them.

        Raises:
            EngineUnavailableError: no engine is ready, or none that is has the request's adapter.
            RequestRefusedError: as `EngineClient.submit`, or there is no such adapter any more.
        """
        engine = self._choose(request, self.engines)
        if engine is None:
            raise self._why_none(request.adapter)
        return PooledStream(self, request, features, engine, engine.submit(request, features))

    def submit_elsewhere(
        self, request: EngineRequest, features: FeatureSource | None, engine: EngineClient
    ) -> RequestStream | None:
        """Once more, on another engine than `engine`. None if there is none that takes it."""
        other = self._choose(request, [other for other in self.engines if other is not engine])
        if other is None:
            return None
        try:
            return other.submit(request, features)
        except (EngineUnavailableError, RequestRefusedError):
            return None

    def _why_none(self, adapter: str) -> EngineUnavailableError | RequestRefusedError:
        if self.state != "ready":
            return EngineUnavailableError(self.down_reason)
        if adapter in self.adapters.by_name:
            return EngineUnavailableError(f"no engine that is ready has the adapter '{adapter}' now")
        return RequestRefusedError(RequestError("invalid", f"adapter: there is no '{adapter}' any more", "adapter"))

    def _choose(self, request: EngineRequest, engines: Sequence[EngineClient]) -> EngineClient | None:
        ready = [engine for engine in engines if engine.state == "ready" and self.adapters.has(engine, request.adapter)]
        num_tokens = len(request.prompt_token_ids) + (request.sampling_params.max_tokens or 1)
        # Where it fits nowhere, the engine cuts it at its limit, which then should be the highest.
        enough = min(num_tokens, max((capabilities_of(engine).max_model_len for engine in ready), default=0))
        fitting = [engine for engine in ready if capabilities_of(engine).max_model_len >= enough]
        return min(fitting, key=lambda engine: engine.num_in_flight + engine.num_other_requests, default=None)


class PooledStream:
    """As `RequestStream`, of whichever engine computes the request. Made by `EnginePool.submit`."""

    def __init__(
        self,
        pool: EnginePool,
        request: EngineRequest,
        features: FeatureSource | None,
        engine: EngineClient,
        stream: RequestStream,
    ) -> None:
        self.request_id = request.request_id
        self._pool = pool
        self._request = request
        self._features = features
        self._engine = engine
        self._stream = stream
        self._on_arrival: Callable[[RequestOutput], None] | None = None
        # As long as nothing of the request has been handed over, and it was sent once only.
        self._may_move = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()

    @property
    def engine_index(self) -> int:
        """As `RequestStream.engine_index`: of the engine that computes the request now."""
        return self._stream.engine_index

    @property
    def on_arrival(self) -> Callable[[RequestOutput], None] | None:
        """As `RequestStream.on_arrival`."""
        return self._on_arrival

    @on_arrival.setter
    def on_arrival(self, tell: Callable[[RequestOutput], None] | None) -> None:
        self._on_arrival = self._stream.on_arrival = tell

    def abort(self) -> None:
        """As `RequestStream.abort`."""
        self._stream.abort()

    def abort_continuation(self, index: int) -> None:
        """As `RequestStream.abort_continuation`."""
        self._stream.abort_continuation(index)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        try:
            output = await anext(self._stream)
        except (EngineUnavailableError, RequestRefusedError) as error:
            if not self._move(error):
                raise
            output = await anext(self._stream)
        self._may_move = False
        return output

    def _move(self, error: EngineUnavailableError | RequestRefusedError) -> bool:
        if not self._may_move or (isinstance(error, RequestRefusedError) and error.error.code != "overloaded"):
            return False
        self._may_move = False
        stream = self._pool.submit_elsewhere(self._request, self._features, self._engine)
        if stream is not None:
            stream.on_arrival = self._on_arrival
            self._stream = stream
        return stream is not None


def open_engines(config: HttpConfig) -> EnginePool:
    """The engines of `config`, yet to be started. One that does not serve the model of `config` will not be used.

    Raises KeyFileError, and ValueError for an endpoint that is none or is not protected.
    """
    own_keys = None if config.curve_key_file is None else load_key_pair(Path(config.curve_key_file))
    digest = tokenizer_digest(Path(config.model_dir))
    engines: list[EngineClient] = []

    def why_unwanted(found: EngineCapabilities) -> str | None:
        if config.engine_model_names and found.model not in config.engine_model_names:
            wanted = " or ".join(f"'{name}'" for name in config.engine_model_names)
            return f"it serves the model '{found.model}', not {wanted}"
        if digest and found.tokenizer_digest and found.tokenizer_digest != digest:
            return f"its tokenizer (digest {found.tokenizer_digest[:12]}) is not this frontend's ({digest[:12]})"
        for engine in engines:
            if not engine.is_connected:
                continue
            for name in ("model", "vocab_size"):
                theirs, ours = getattr(found, name), getattr(capabilities_of(engine), name)
                if theirs != ours:
                    return f"its {name} is {theirs!r}, that of engine {engine.index} {ours!r}"
        return None

    for index, address in enumerate(config.engines):
        keys = None
        if own_keys is not None and address.key_file is not None:
            keys = FrontendKeys(own_keys, load_public_key(Path(address.key_file)))
        engines.append(
            EngineClient(
                address.endpoint,
                index=index,
                name="http",
                keys=keys,
                insecure=config.insecure,
                why_unwanted=why_unwanted,
            )
        )
    return EnginePool(engines)


def reason_for_clients(engine: EngineClient | EnginePool) -> str | None:
    """Why there is no engine to answer; None if there is one."""
    # What an engine client says until then names the engine's socket, which is nobody's business out there.
    return "no engine has answered yet" if engine.state == "connecting" else engine.down_reason
