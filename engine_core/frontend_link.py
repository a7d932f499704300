"""The engine's end of the wire: a thread that owns the ROUTER and knows every frontend, but no model.

It receives, checks and hashes requests, sends outputs and heartbeats, and notices who is gone, however long a step
takes. The engine loop hears of it only through a queue of commands, and never waits for it.

What is on its way to them is kept by `frontend_sessions`.

A message that cannot be read may have been a request somebody waits for. So it is counted and, if it came from a
known frontend, ends that session: its requests are aborted and it is told goodbye, upon which it fails them and starts
anew. So does a message that never came, as the numbers of those after it show (`ipc.sequence`); one that came twice is
dropped and counted. From strangers such messages are only counted. Either way every other frontend goes on as before.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

import zmq

from ipc.codec import PROTOCOL_VERSION, Decoder, WireError, read_header
from ipc.curve import Authorizer, EngineKeys
from ipc.drops import DropCounter
from ipc.messages import (
    AbortRequests,
    AdapterAnswer,
    Adapters,
    AddRequest,
    CacheProbed,
    EngineMessage,
    EngineOutputs,
    FrontendMessage,
    GetStats,
    Goodbye,
    Heartbeat,
    Hello,
    LoadAdapter,
    PrefixCacheWasReset,
    ProbeCache,
    Refused,
    ResetPrefixCache,
    Stats,
    SupplyFeature,
    UnloadAdapter,
    WantFeatures,
    Welcome,
)
from ipc.sockets import QUEUE_MESSAGES, bind_router, peer_name
from ipc.stats import EngineStats
from ipc.vocabulary import EngineCapabilities, EngineRequest, RequestError, RequestOutput, WantedFeature
from ipc.wakeup import Wakeup

from .adapter_calls import AdapterCalls
from .commands import Abort, AbortContinuations, Add, Command, Drain, Probe, Reset, Stop, Supply
from .frontend_requests import FrontendRequests
from .frontend_session import FrontendSession
from .frontend_sessions import ENTRIES_PER_MESSAGE, FrontendSessions
from .request import Request

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

# Decoding, checking and hashing one long prompt takes tens of milliseconds: a turn of receiving is bounded by time.
_RECEIVE_TURN_S = 0.02
# A ROUTER cannot tell when one particular peer can be written to again, so a backlog is retried.
_BACKLOG_RETRY_S = 0.005


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Times and bounds of the wire, and who may use it.

    In a backlog, outputs of several steps become one message of up to `max_merged_tokens`. A `tcp://` endpoint takes
    `keys`, or `insecure`.
    """

    heartbeat_interval_s: float = 1.0
    frontend_timeout_s: float = 10.0
    queue_messages: int = QUEUE_MESSAGES
    max_backlog_messages: int = 1024
    max_merged_tokens: int = 4096
    keys: EngineKeys | None = None
    insecure: bool = False


class FrontendLink:
    """Serves frontends at an endpoint until stopped.

    `commands` receives what they want, in order; a `Stop(1)` in it says that this thread has failed.
    Request ids in commands, in `publish` and in `publish_wanted` are the engine's own.
    """

    def __init__(
        self,
        endpoint: str,
        capabilities: EngineCapabilities,
        prepare_request: Callable[[EngineRequest], Request],
        stats: Callable[[], EngineStats],
        adapter_calls: AdapterCalls,
        commands: SimpleQueue[Command],
        settings: LinkSettings,
    ) -> None:
        """Binds the socket; raises what `ipc.sockets.bind_router` and `ipc.curve.Authorizer` raise.

        `prepare_request` and `stats` are called while the engine computes a step.
        """
        self.epoch = secrets.randbits(64) or 1
        self.drops = DropCounter("engine")
        self._capabilities = capabilities
        self._stats = stats
        self._adapter_calls = adapter_calls
        self._commands = commands
        self._settings = settings
        self._decoder: Decoder[FrontendMessage] = Decoder(FrontendMessage)
        self._requests = FrontendRequests(prepare_request)
        self._outbox: deque[EngineOutputs | list[WantedFeature]] = deque()
        self._answers: deque[tuple[FrontendSession, EngineMessage]] = deque()
        self._stopping = False
        self._drain_wanted = False
        self._draining = False
        self._next_beat_s = time.monotonic()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._authorizer = None if settings.keys is None else Authorizer(self._context, settings.keys, self.drops)
            self._router = bind_router(
                self._context,
                endpoint,
                keys=settings.keys,
                insecure=settings.insecure,
                queue_messages=settings.queue_messages,
            )
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._sessions = FrontendSessions(
            self._router,
            self.epoch,
            settings.max_backlog_messages,
            settings.max_merged_tokens,
            lambda frontend: self._abort(frontend, list(frontend.engine_ids)),
        )
        self._wakeup = Wakeup()
        self._thread = threading.Thread(target=self._run, name="frontend-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def publish(self, outputs: EngineOutputs) -> None:
        """Send what a step produced to whom it concerns. Never waits. The outputs are the link's from here on."""
        self._outbox.append(outputs)
        self._wakeup.wake()

    def publish_wanted(self, wanted: list[WantedFeature]) -> None:
        """Ask whom it concerns for these features' inputs, which come as `Supply` commands. Never waits.

        Passed over are those of requests that are over.
        """
        self._outbox.append(wanted)
        self._wakeup.wake()

    def drain(self) -> None:
        """From now on refuse new requests, and tell every frontend so. From any thread or signal handler, any time."""
        self._drain_wanted = True
        self._wakeup.wake()

    def stop(self) -> None:
        """Send what was published, say goodbye to everybody, close. Waits for it (about a second at most)."""
        self._stopping = True
        self._wakeup.wake()
        self._thread.join()
        self._wakeup.close()

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._router, zmq.POLLIN)
            woken = self._wakeup.fileno()
            poller.register(woken, zmq.POLLIN)
            if self._authorizer is not None:
                poller.register(self._authorizer.socket, zmq.POLLIN)
            while not self._stopping:
                events = dict(poller.poll(self._wait_ms()))
                if woken in events:
                    self._wakeup.clear()
                if self._authorizer is not None and self._authorizer.socket in events:
                    self._authorizer.answer()
                if self._drain_wanted and not self._draining:
                    self._announce_drain()
                self._receive()
                self._flush()
                self._beat()
            self._flush()
            for frontend in self._sessions:
                self._sessions.tell(frontend.identity, Goodbye())
        except Exception:
            logger.exception("frontend_link_failed")
            self._commands.put(Stop(1))
        finally:
            self._router.close()
            if self._authorizer is not None:
                self._authorizer.socket.close()
            self._context.term()

    def _wait_ms(self) -> int:
        wait_s = self._next_beat_s - time.monotonic()
        if self._sessions.has_backlog():
            wait_s = min(wait_s, _BACKLOG_RETRY_S)
        return max(0, round(wait_s * 1000))

    def _receive(self) -> None:
        """Take what has arrived, one message at least; stop when there is something to send, or the turn is over."""
        turn_ends_s = min(time.monotonic() + _RECEIVE_TURN_S, self._next_beat_s)
        while True:
            try:
                identity, *frames = self._router.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            self._take(identity.bytes, [frame.buffer for frame in frames])
            if self._outbox or time.monotonic() >= turn_ends_s:
                return

    def _take(self, identity: bytes, frames: list[memoryview]) -> None:
        frontend = self._sessions.get(identity)
        try:
            epoch, sequence, message = self._decoder.decode(frames)
        except WireError as error:
            self.drops.add(error.reason, str(error))
            if error.reason == "version":
                version = read_header(frames).version
                reason = f"the engine speaks protocol {PROTOCOL_VERSION}, the frontend {version}"
                self._sessions.tell(identity, Refused(reason))
            if frontend is not None:
                self._sessions.end(frontend, "unreadable_message")
            return
        if isinstance(message, Hello):
            self._greet(identity, frontend, sequence)
            return
        if epoch != self.epoch:
            self.drops.add("stale_epoch", f"message of epoch {epoch}, the engine's is {self.epoch}")
            return
        if frontend is None:
            # It was given up while it was silent and does not know yet.
            self.drops.add("no_session", type(message).__name__)
            self._sessions.tell(identity, Goodbye())
            return
        if isinstance(message, Goodbye):
            self._sessions.forget(frontend, "goodbye")
            return
        if not self._is_next(frontend, sequence):
            return
        frontend.last_heard_s = time.monotonic()
        if isinstance(message, AddRequest):
            self._add(frontend, message.request)
        elif isinstance(message, SupplyFeature):
            self._supply(frontend, message)
        elif isinstance(message, AbortRequests):
            self._abort(frontend, message.request_ids)
            self._abort_continuations(frontend, message.continuations)
        elif isinstance(message, GetStats):
            self._sessions.enqueue(frontend, Stats(message.call_id, self._stats(), dict(self.drops.counts)))
        elif isinstance(message, ResetPrefixCache):
            answer = self._answer(frontend, partial(PrefixCacheWasReset, message.call_id))
            self._commands.put(Reset(message.reset_running_requests, answer))
        elif isinstance(message, ProbeCache):
            self._probe(frontend, message)
        elif isinstance(message, LoadAdapter | UnloadAdapter):
            self._adapter_calls.ask(message, self._answer(frontend, lambda answer: answer))

    def _is_next(self, frontend: FrontendSession, sequence: int) -> bool:
        """Whether this message is to be taken. One that shows that others were lost ends the session."""
        verdict = frontend.judge(sequence)
        if verdict != "next":
            detail = f"message {sequence} of {peer_name(frontend.identity)}, expected {frontend.expected}"
            self.drops.add(verdict, detail)
        if verdict == "lost":
            self._sessions.end(frontend, "lost_message")
        return verdict == "next"

    def _greet(self, identity: bytes, frontend: FrontendSession | None, sequence: int) -> None:
        if frontend is None:
            frontend = self._sessions.begin(identity, sequence + 1)
        elif sequence < frontend.expected:
            self.drops.add("duplicate", f"hello {sequence} of {peer_name(identity)}, expected {frontend.expected}")
            return
        else:
            self._sessions.begin_anew(frontend, sequence + 1)
        self._sessions.enqueue(frontend, Welcome(self._capabilities, sequence, self._adapter_calls.adapters()))
        self._sessions.enqueue(frontend, self._heartbeat(frontend))

    def _announce_drain(self) -> None:
        self._draining = True
        self._commands.put(Drain())
        for frontend in self._sessions:
            self._sessions.enqueue(frontend, self._heartbeat(frontend))

    def _heartbeat(self, frontend: FrontendSession) -> Heartbeat:
        return Heartbeat(len(self._requests) - len(frontend.engine_ids), self._draining)

    def _add(self, frontend: FrontendSession, request: EngineRequest) -> None:
        if self._sessions.is_full(frontend):
            self._refuse(frontend, request.request_id, self._sessions.not_reading())
        elif self._draining:
            message = "the engine is about to stop and takes no new requests"
            self._refuse(frontend, request.request_id, RequestError("overloaded", message, reason="draining"))
        else:
            admitted = self._requests.admit(frontend, request)
            if isinstance(admitted, RequestError):
                self._refuse(frontend, request.request_id, admitted)
            else:
                self._commands.put(Add(admitted))

    def _supply(self, frontend: FrontendSession, message: SupplyFeature) -> None:
        # Unknown is what ended while its inputs were on their way.
        if (engine_id := frontend.engine_ids.get(message.request_id)) is None:
            return
        # What was not asked for is not kept: the engine bounds what it asks for, nothing else bounds what is sent.
        if not self._requests.accept_supply(engine_id, message.key):
            self.drops.add("unwanted_feature", f"{message.key.hex()} for {message.request_id}")
            return
        self._commands.put(Supply(engine_id, message.key, message.inputs, message.error))

    def _answer(self, frontend: FrontendSession, make: Callable[[ResultT], EngineMessage]) -> Callable[[ResultT], None]:
        """What takes a result, in any thread, and has the frontend told what `make` makes of it."""

        def answer(result: ResultT) -> None:
            self._answers.append((frontend, make(result)))
            self._wakeup.wake()

        return answer

    def _probe(self, frontend: FrontendSession, message: ProbeCache) -> None:
        prepared = self._requests.prepare(message.request)
        if isinstance(prepared, RequestError):
            self._sessions.enqueue(frontend, CacheProbed(message.call_id, error=prepared))
        else:
            relative_end = message.relative_end if message.explain else None
            answer = self._answer(frontend, partial(CacheProbed, message.call_id))
            self._commands.put(Probe(prepared, relative_end, answer))

    def _abort(self, frontend: FrontendSession, own_ids: Iterable[str]) -> None:
        if engine_ids := self._requests.remove(frontend, own_ids):
            self._commands.put(Abort(engine_ids))

    def _abort_continuations(self, frontend: FrontendSession, continuations: Iterable[tuple[str, int]]) -> None:
        known = [
            (engine_id, index)
            for own_id, index in continuations
            if (engine_id := frontend.engine_ids.get(own_id)) is not None
        ]
        if known:
            self._commands.put(AbortContinuations(known))

    def _refuse(self, frontend: FrontendSession, own_id: str, error: RequestError) -> None:
        self._sessions.enqueue(frontend, EngineOutputs([RequestOutput(own_id, [], finish_reason="error", error=error)]))

    def _flush(self) -> None:
        self._sessions.send_backlogs()
        while self._outbox:
            published = self._outbox.popleft()
            if isinstance(published, EngineOutputs):
                self._route_outputs(published)
            else:
                self._route_wanted(published)
        while self._answers:
            frontend, answer = self._answers.popleft()
            if isinstance(answer, AdapterAnswer) and answer.adapter is not None:
                self._tell_adapters()
            if self._sessions.is_live(frontend):
                self._sessions.enqueue(frontend, answer)

    def _tell_adapters(self) -> None:
        """To everybody, as it is by now: so nobody is told of it in another order than it happened."""
        for frontend in self._sessions:
            self._sessions.enqueue(frontend, Adapters(self._adapter_calls.adapters()))

    def _route_outputs(self, outputs: EngineOutputs) -> None:
        for frontend, share in self._requests.shares_of_outputs(outputs.outputs).items():
            together = []
            for output in share:
                # The engine sees to it that one fits a message; several together may not.
                if output.prompt_logprobs is not None:
                    self._sessions.enqueue(frontend, EngineOutputs([output]))
                else:
                    together.append(output)
            if together:
                self._sessions.enqueue(frontend, EngineOutputs(together))

    def _route_wanted(self, wanted: list[WantedFeature]) -> None:
        for frontend, share in self._requests.shares_of_wanted(wanted).items():
            for start in range(0, len(share), ENTRIES_PER_MESSAGE):
                self._sessions.enqueue(frontend, WantFeatures(share[start : start + ENTRIES_PER_MESSAGE]))

    def _beat(self) -> None:
        now_s = time.monotonic()
        late_s = now_s - self._next_beat_s
        if late_s < 0:
            return
        interval_s = self._settings.heartbeat_interval_s
        self._next_beat_s = now_s + interval_s
        for frontend in self._sessions:
            if late_s > interval_s:
                # It was this process that slept; their heartbeats may be waiting in the socket.
                frontend.last_heard_s = min(frontend.last_heard_s + late_s, now_s)
            if now_s - frontend.last_heard_s > self._settings.frontend_timeout_s:
                self._sessions.end(frontend, "silent")
            elif not frontend.backlog:
                # What waits is as good a sign of life, and a heartbeat must not overtake a welcome.
                self._sessions.send(frontend, self._heartbeat(frontend))
