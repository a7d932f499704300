"""The frontend's end of the wire: one engine core, found, watched, lost and found again.

A session is one DEALER socket, one handshake, one epoch. When the engine dies (its socket closes), falls
silent (heartbeats), says goodbye, sends what cannot be read or when a message of its is missing (it may have been
somebody's tokens), the session ends: every stream fails at once, then a fresh socket is tried until an engine answers.
Nothing of an old session can reach a new engine, nor the other way round.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Literal

import zmq
from zmq.utils.monitor import parse_monitor_message

from ipc.codec import Decoder, WireError
from ipc.curve import FrontendKeys, check_security, why_no_handshake
from ipc.drops import DropCounter
from ipc.endpoints import check_endpoint
from ipc.messages import (
    Adapters,
    EngineMessage,
    EngineOutputs,
    FrontendMessage,
    Goodbye,
    Heartbeat,
    Hello,
    Refused,
    WantFeatures,
    Welcome,
)
from ipc.vocabulary import AdapterInfo, EngineCapabilities, EngineRequest

from .engine_calls import Answer, EngineCalls
from .engine_errors import EngineUnavailableError
from .engine_session import EngineSession
from .feature_supply import FeatureSource
from .in_flight import RequestsInFlight
from .request_stream import RequestStream

logger = logging.getLogger(__name__)

_MIN_RETRY_S = 0.05
_MAX_RETRY_S = 0.5
# Most models are loaded by then. Who has mistyped an endpoint waits for nothing.
_AWAITED_S = 15.0
# An engine that is there and does not want us, or is not wanted, has to be changed by somebody.
_MAX_RETRY_AFTER_REFUSAL_S = 5.0

# When an engine tells which adapters it has: as it answers for the first time, as another one in its place answers, as
# it is found again, or when somebody has changed them.
Occasion = Literal["first", "restarted", "found_again", "changed"]
AdapterListener = Callable[["EngineClient", Mapping[str, AdapterInfo], Occasion], None]


class _SessionEndedError(Exception):
    """`telling`: the reason says more than that no engine answers, also where none ever did."""

    def __init__(self, reason: str, *, telling: bool = False) -> None:
        super().__init__(reason)
        self.telling = telling


class EngineClient:
    """A connection to one engine core that heals itself. Use from one event loop.

    Attributes:
        state: `connecting` until an engine has answered for the first time; `ready`; `draining` when it is about to
            stop: what runs goes on, new requests are not taken; `down` when the engine was lost, refuses us or is
            not the one we want, until one answers again.
        down_reason: why the state is not `ready`, for people; None when it is.
        capabilities: of the engine that answered last; None before the first.
        loaded_adapters: by name, as it said last.
        on_adapters: told what it had said before, whenever it says which adapters it has.
        num_restarts: how often another engine answered than before.
        num_other_requests: what this engine is working on for other frontends, as it said last.
        calls: what the engine can be asked, whether it takes requests or not.
        drops: messages that were not used, by reason.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        index: int = 0,
        name: str = "frontend",
        keys: FrontendKeys | None = None,
        insecure: bool = False,
        why_unwanted: Callable[[EngineCapabilities], str | None] = lambda capabilities: None,
        quiet: bool = False,
        heartbeat_interval_s: float = 1.0,
        heartbeat_timeout_s: float = 4.0,
    ) -> None:
        """`endpoint` is where the engine's ROUTER is (or will be) bound. Raises ValueError if it cannot be one, or is a
        `tcp://` one with neither `keys` nor `insecure`.

        An engine that `why_unwanted` has something against is not used: the state is `down` and that the reason.
        An engine silent for `heartbeat_timeout_s` is lost, and so is one that does not answer the handshake.
        `index` is the engine's number among those of this frontend. `name` tells this client from others in the
        engine's log; `quiet` is for one that only watches: finding and losing the engine is somebody else's news, and
        logged at DEBUG.
        """
        check_endpoint(endpoint)
        check_security(endpoint, has_keys=keys is not None, insecure=insecure)
        self.endpoint = endpoint
        self.index = index
        self._name = name
        self._keys = keys
        self._insecure = insecure
        self._why_unwanted = why_unwanted
        self._quiet = quiet
        self.state: Literal["connecting", "ready", "draining", "down"] = "connecting"
        self.down_reason: str | None = f"no engine has answered at {endpoint} yet"
        self.capabilities: EngineCapabilities | None = None
        self.loaded_adapters: Mapping[str, AdapterInfo] = {}
        self.on_adapters: AdapterListener = lambda engine, before, occasion: None
        self.num_other_requests = 0
        self.drops = DropCounter("engine_client")
        self.num_restarts = 0
        self._known_epoch: int | None = None
        self._is_awaited = False
        self._heartbeat_interval_s = heartbeat_interval_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._decoder: Decoder[EngineMessage] = Decoder(EngineMessage)
        self._in_flight = RequestsInFlight(index)
        self.calls = EngineCalls(self._ask)
        self._closing = False
        self._session: EngineSession | None = None
        self._ready = asyncio.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def num_in_flight(self) -> int:
        """Requests submitted and neither finished, failed nor aborted."""
        return len(self._in_flight)

    @property
    def num_features_supplied(self) -> int:
        """How many pictures' inputs engines asked for and were sent."""
        return self._in_flight.supply.num_features

    @property
    def num_feature_bytes_supplied(self) -> int:
        """What those inputs weighed."""
        return self._in_flight.supply.num_bytes

    @property
    def is_connected(self) -> bool:
        """Whether there is an engine that lives and talks to us, be it about to stop."""
        return self.state in {"ready", "draining"}

    async def start(self) -> None:
        """Begin looking for the engine. Returns at once."""
        if self._task is not None:
            raise RuntimeError("the client was started already")
        self._context = zmq.Context()
        self._task = asyncio.create_task(self._run(), name="engine_client")

    async def close(self) -> None:
        """Say goodbye, fail what is in flight and release the socket. Idempotent."""
        if self._task is None or self._context is None:
            return
        # Nothing may follow the goodbye.
        self._in_flight.supply.forget_all()
        if self._session is not None and self._session.epoch:
            self._session.send(Goodbye())
        self._closing = True
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._lose(_SessionEndedError("the client was closed"))
        await asyncio.to_thread(self._context.term)
        self._task = self._context = None

    async def wait_ready(self, timeout_s: float | None = None) -> None:
        """Return when the state is `ready`. Raises EngineUnavailableError after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            raise EngineUnavailableError(self.down_reason) from None

    def submit(self, request: EngineRequest, features: FeatureSource | None = None) -> RequestStream:
        """Send `request` on its way. Never blocks. Enter the stream at once: `async with client.submit(r) as stream:`.

        `features` has the inputs of its `mm_features`, should the engine want them.

        Raises:
            EngineUnavailableError: the state is not `ready`.
            RequestRefusedError: its id is in flight already (`invalid`), it cannot be sent (`invalid`; `param` is the
                field, if it is one), or the engine does not keep up with taking requests (`overloaded`).
        """
        if self.state != "ready" or self._session is None:
            raise EngineUnavailableError(self.down_reason)
        return self._in_flight.submit(self._session, request, features)

    def _ask(self, message: FrontendMessage) -> None:
        """See `EngineCalls`."""
        if not self.is_connected or self._session is None:
            raise EngineUnavailableError(self.down_reason)
        if not self._session.send(message):
            raise EngineUnavailableError("the engine does not keep up with taking messages")

    async def _run(self) -> None:
        retry_s = _MIN_RETRY_S
        started_s = time.monotonic()
        # A task group that fails while it is being cancelled swallows the cancellation, hence the flag.
        while not self._closing:
            ended = _SessionEndedError("the client failed")
            try:
                await self._run_session()
            except* _SessionEndedError as group:
                first = group.exceptions[0]
                assert isinstance(first, _SessionEndedError)
                ended = first
            except* Exception as group:
                # Whatever went wrong here: streams must end and the engine be found again.
                error = group.exceptions[0]
                ended = _SessionEndedError(f"the client failed: {type(error).__name__}: {error}", telling=True)
                if str(ended) != self.down_reason:
                    logger.error("engine_session_failed endpoint=%s", self.endpoint, exc_info=error)
            was_connected = self.is_connected
            self._lose(ended)
            if self.state == "connecting" and time.monotonic() - started_s >= _AWAITED_S:
                self._say_awaited()
            max_retry_s = _MAX_RETRY_AFTER_REFUSAL_S if ended.telling else _MAX_RETRY_S
            retry_s = _MIN_RETRY_S if was_connected else min(2 * retry_s, max_retry_s)
            await asyncio.sleep(retry_s)

    async def _run_session(self) -> None:
        """One session, until it ends with an exception."""
        assert self._context is not None
        session = self._session = EngineSession(
            self._context, self.endpoint, self._name, keys=self._keys, insecure=self._insecure
        )
        try:
            session.send(Hello())
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(session.monitor_reader.run(lambda frames: self._take_event(session, frames)))
                tasks.create_task(self._beat(session))
                tasks.create_task(session.reader.run(lambda frames: self._take(session, frames)))
        finally:
            session.close(flush=self._closing)

    def _lose(self, ended: _SessionEndedError) -> None:
        reason = str(ended)
        if self.is_connected or ended.telling:
            if reason != self.down_reason and not self._closing:
                logger.log(
                    logging.DEBUG if self._quiet else logging.WARNING,
                    "engine_lost endpoint=%s in_flight=%d reason=%r",
                    self.endpoint,
                    self.num_in_flight,
                    reason,
                )
            self.state = "down"
            self.down_reason = reason
        self._session = None
        self._ready.clear()
        self._in_flight.fail_all(EngineUnavailableError(reason))
        self.calls.fail_all(EngineUnavailableError(reason))

    def _say_awaited(self) -> None:
        """Once, that no engine has answered for long: it is starting, or nothing will ever listen there."""
        if not self._is_awaited:
            self._is_awaited = True
            logger.log(
                logging.DEBUG if self._quiet else logging.INFO,
                "engine_awaited endpoint=%s waited_s=%.0f",
                self.endpoint,
                _AWAITED_S,
            )

    def _take_event(self, session: EngineSession, frames: list[memoryview]) -> None:
        event = parse_monitor_message([frame.tobytes() for frame in frames])
        if (reason := why_no_handshake(event, self.endpoint, has_keys=self._keys is not None)) is not None:
            raise _SessionEndedError(reason, telling=True)
        if event["event"] != zmq.EVENT_MONITOR_STOPPED:
            for waiting in session.reader.waiting():
                self._take(session, waiting)
            raise _SessionEndedError("the engine closed the connection")

    async def _beat(self, session: EngineSession) -> None:
        last_s = time.monotonic()
        while True:
            await asyncio.sleep(self._heartbeat_interval_s)
            now_s = time.monotonic()
            late_s = now_s - last_s - self._heartbeat_interval_s
            last_s = now_s
            if late_s > self._heartbeat_interval_s:
                # It was this process that slept; the engine's heartbeats may be waiting in the socket.
                session.last_heard_s = min(session.last_heard_s + late_s, now_s)
            silent_s = now_s - session.last_heard_s
            if silent_s > self._heartbeat_timeout_s:
                raise _SessionEndedError(f"the engine was silent for {silent_s:.1f} s")
            if session.epoch:
                session.send(Heartbeat())
                self._in_flight.send_aborts()

    def _take(self, session: EngineSession, frames: list[memoryview]) -> None:
        try:
            epoch, sequence, message = self._decoder.decode(frames)
        except WireError as error:
            self.drops.add(error.reason, str(error))
            reason = str(error) if error.reason == "version" else f"the engine sent what cannot be read: {error}"
            raise _SessionEndedError(reason, telling=True) from error
        if isinstance(message, Refused):
            raise _SessionEndedError(f"the engine refused the connection: {message.reason}", telling=True)
        if epoch != session.epoch or not epoch:
            begins = epoch and not session.epoch
            if begins and isinstance(message, Welcome) and message.hello_sequence == session.hello_sequence:
                self._welcome(session, epoch, sequence, message)
            else:
                self.drops.add("stale_epoch", f"message of epoch {epoch}, the session's is {session.epoch}")
            return
        if isinstance(message, Goodbye):
            raise _SessionEndedError("the engine said goodbye")
        if not self._is_next(session, sequence):
            return
        session.last_heard_s = time.monotonic()
        if isinstance(message, EngineOutputs):
            for output in message.outputs:
                self._in_flight.deliver(output)
        elif isinstance(message, WantFeatures):
            for wanted in message.features:
                self._in_flight.answer(wanted)
        elif isinstance(message, Answer):
            self.calls.take(epoch, message)
        elif isinstance(message, Adapters):
            self._learn_adapters(message.adapters, "changed")
        elif isinstance(message, Heartbeat):
            self.num_other_requests = message.num_other_requests
            if message.is_draining and self.state == "ready":
                self._stop_submitting()
        elif isinstance(message, Welcome):
            # Nobody asked for it, but it has given up what was in flight.
            raise _SessionEndedError("the engine began the session anew")

    def _is_next(self, session: EngineSession, sequence: int) -> bool:
        """Whether this message is to be taken. One that shows that others were lost ends the session."""
        verdict = session.judge(sequence)
        if verdict != "next":
            detail = f"message {sequence} of the engine, expected {session.expected}"
            self.drops.add(verdict, detail)
            if verdict == "lost":
                raise _SessionEndedError(f"messages were lost: {detail}")
        return verdict == "next"

    def _stop_submitting(self) -> None:
        self.state = "draining"
        self.down_reason = "the engine is about to stop"
        self._ready.clear()
        logger.log(
            logging.DEBUG if self._quiet else logging.INFO,
            "engine_draining endpoint=%s in_flight=%d",
            self.endpoint,
            self.num_in_flight,
        )

    def _learn_adapters(self, adapters: list[AdapterInfo], occasion: Occasion) -> None:
        before, self.loaded_adapters = self.loaded_adapters, {adapter.name: adapter for adapter in adapters}
        self.on_adapters(self, before, occasion)

    def _welcome(self, session: EngineSession, epoch: int, sequence: int, welcome: Welcome) -> None:
        capabilities = welcome.capabilities
        if (reason := self._why_unwanted(capabilities)) is not None:
            raise _SessionEndedError(f"not the engine that is wanted: {reason}", telling=True)
        session.epoch = epoch
        occasion: Occasion = "found_again"
        if self._known_epoch != epoch:
            occasion = "first" if self._known_epoch is None else "restarted"
        self.num_restarts += occasion == "restarted"
        self._known_epoch = epoch
        session.expected = sequence + 1
        session.last_heard_s = time.monotonic()
        self.capabilities = capabilities
        self.state = "ready"
        self.down_reason = None
        self._ready.set()
        logger.log(
            logging.DEBUG if self._quiet else logging.INFO,
            "engine_found endpoint=%s epoch=%d model=%s",
            self.endpoint,
            epoch,
            capabilities.model,
        )
        self._learn_adapters(welcome.adapters, occasion)


def capabilities_of(engine: EngineClient) -> EngineCapabilities:
    """Those of an engine that has answered."""
    assert engine.capabilities is not None
    return engine.capabilities
