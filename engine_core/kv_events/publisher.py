"""The thread that tells the world what the prefix cache gains and loses.

The engine loop hands over what a step changed and never waits: what finds the queue full is dropped. Everybody can see
that: the numbers of the batches skip those that were dropped, and a batch of its own says which they were. A subscriber
that does not read loses batches alone; ZeroMQ says when it begins to, not when it ends, so the batch that tells of it
is sent several times, at growing intervals. Whoever has missed something asks the replay socket.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import zmq

from engine_core.config import KVEventsConfig
from engine_core.errors import InvalidConfigError
from ipc.endpoints import is_tcp, tcp_address
from ipc.kv_events import AllBlocksCleared, BatchEncoder, EventsDropped, KVEvent, KVEventFormat
from ipc.kv_events.requests import NUMBER_BYTES, encode_number
from ipc.sockets import check_listenable
from ipc.wakeup import Wakeup

from .answers import Answers, SharedBatches
from .describe import EventDescriber
from .recorder import CacheChange

logger = logging.getLogger(__name__)

_BATCHES_PER_TURN = 64
_NODES_PER_SNAPSHOT_BATCH = 1024
# The engine loop makes a list for each, and this thread encodes it.
_SNAPSHOT_INTERVAL_S = 1.0
# A ROUTER cannot tell when one particular peer can be written to again.
_ANSWER_RETRY_S = 0.005
_FIRST_REMINDER_S = 0.5
_LAST_REMINDER_S = 60.0
_STOP_TIMEOUT_S = 2.0
_LINGER_MS = 500
_MAX_REQUEST_BYTES = 4096
_LOOPBACK = {"127.0.0.1", "::1", "localhost"}


class _Queued(NamedTuple):
    """What a step changed, or all there is (`ts` is None then), and how many steps' changes were dropped before."""

    ts: float | None
    changes: Sequence[CacheChange]
    num_dropped: int


class KVEventPublisher:
    """Publishes until stopped.

    Args:
        config: with an endpoint.
        describer: turns changes into events, in this object's thread.
        ask_for_snapshot: called when a consumer wants one, in the publisher's thread: `publish_snapshot` is to follow.
        on_failure: called if the thread fails.

    Attributes:
        num_batches: batches published.

    Raises:
        InvalidConfigError: an endpoint cannot be used.
    """

    def __init__(
        self,
        config: KVEventsConfig,
        describer: EventDescriber,
        *,
        event_format: KVEventFormat = "map",
        ask_for_snapshot: Callable[[], None],
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self.num_batches = 0
        self._num_not_queued = 0
        self._num_refused = 0
        self._config = config
        self._describer = describer
        self._encoder = BatchEncoder(event_format)
        self._topic = config.topic.encode()
        self._ask_for_snapshot = ask_for_snapshot
        self._on_failure = on_failure
        self._queue: deque[_Queued] = deque()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._next_sequence = 0
        self._num_dropped_told = 0
        self._reminder: _Reminder | None = None
        self._snapshot_asked = False
        self._snapshot_at_s = 0.0
        self._stopping = False

        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._pub = self._open_pub()
            self._answers = self._open_answers(secrets.token_bytes(NUMBER_BYTES))
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._wakeup = Wakeup()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)

    def _open_pub(self) -> zmq.Socket[bytes]:
        config = self._config
        assert config.endpoint is not None
        pub = self._socket(zmq.PUB, config.endpoint, config.hwm)
        # Else batches are dropped in silence where a subscriber does not read.
        pub.setsockopt(zmq.XPUB_NODROP, 1)
        _attach(pub, config.endpoint, "endpoint", binds=config.binds)
        return pub

    def _open_answers(self, epoch: bytes) -> Answers | None:
        endpoint = self._config.replay_endpoint
        if endpoint is None:
            return None
        router = self._socket(zmq.ROUTER, endpoint, 1000)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        _attach(router, endpoint, "replay_endpoint", binds=True)
        return Answers(router, self._topic, epoch, self._buffer)

    def _socket(self, kind: int, endpoint: str, queue_messages: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.setsockopt(zmq.SNDHWM, queue_messages)
        made.setsockopt(zmq.LINGER, _LINGER_MS)
        # Of what comes in: subscriptions and requests.
        made.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
        made.setsockopt(zmq.IPV6, int("[" in endpoint))
        return made

    @property
    def dropped_batches(self) -> dict[str, int]:
        """By reason. `queue_full`: for everybody. `subscriber_full`: for one that did not read, each time it was found
        so; ZeroMQ does not tell of the batches that it loses from there on until it reads.
        """
        counts = {"queue_full": self._num_not_queued, "subscriber_full": self._num_refused}
        return {reason: count for reason, count in counts.items() if count}

    def start(self) -> None:
        self._thread.start()

    def publish(self, changes: Sequence[CacheChange]) -> None:
        """What one step changed. Never waits; for the thread that steps the engine."""
        if len(self._queue) >= self._config.max_queue_size:
            self._num_not_queued += 1
        else:
            self._queue.append(_Queued(time.time(), changes, self._num_not_queued))
        self._wakeup.wake()

    def publish_snapshot(self, changes: Sequence[CacheChange]) -> None:
        """All that is there, as of what was published so far, for those who asked. Never waits; for the same thread."""
        self._queue.append(_Queued(None, changes, self._num_not_queued))
        self._wakeup.wake()

    def stop(self) -> None:
        """Publish what is queued, if it was started, and close. Waits for it, some seconds at most."""
        self._stopping = True
        self._wakeup.wake()
        if self._thread.ident is not None:
            self._thread.join()
        self._context.destroy(linger=0)
        self._wakeup.close()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            logger.exception("kv_events_failed")
            self._on_failure()
        finally:
            self._pub.close()
            if self._answers is not None:
                self._answers.router.close()
            self._context.term()

    def _serve(self) -> None:
        poller = zmq.Poller()
        woken = self._wakeup.fileno()
        poller.register(woken, zmq.POLLIN)
        if self._answers is not None:
            poller.register(self._answers.router, zmq.POLLIN)
        could_do_more = False
        while not self._stopping:
            if woken in dict(poller.poll(0 if could_do_more else self._wait_ms())):
                self._wakeup.clear()
            could_do_more = self._publish_some()
            if self._answers is not None:
                self._answers.receive()
                could_do_more |= self._answers.send()
                self._see_to_snapshot(self._answers)
        stop_s = time.monotonic() + _STOP_TIMEOUT_S
        while self._publish_some() and time.monotonic() < stop_s:
            pass

    def _wait_ms(self) -> int | None:
        times_s = []
        if self._reminder is not None:
            times_s.append(self._reminder.at_s)
        if self._answers is not None:
            if self._answers.is_busy:
                times_s.append(time.monotonic() + _ANSWER_RETRY_S)
            if self._answers.want_snapshot and not self._snapshot_asked:
                times_s.append(self._snapshot_at_s)
        return math.ceil(max(0.0, min(times_s) - time.monotonic()) * 1000) if times_s else None

    def _publish_some(self) -> bool:
        """Returns whether the queue has more."""
        for _ in range(_BATCHES_PER_TURN):
            # Before the look at the queue: what is dropped after it may be told of after what is queued by then.
            num_dropped = self._num_not_queued
            if not self._queue:
                self._tell_of_dropped(num_dropped)
                self._remind()
                return False
            self._take(self._queue.popleft())
        return True

    def _take(self, queued: _Queued) -> None:
        self._tell_of_dropped(queued.num_dropped)
        if queued.ts is not None:
            self._publish(queued.ts, self._describer.events(queued.changes))
        elif self._answers is not None:
            self._snapshot_asked = False
            self._answers.answer_with(SharedBatches(self._snapshot(queued.changes)), self._next_sequence)

    def _snapshot(self, changes: Sequence[CacheChange]) -> Iterator[bytes]:
        ts = time.time()
        yield self._encoder.encode(ts, [AllBlocksCleared()])
        for what, group, nodes in changes:
            for start in range(0, len(nodes), _NODES_PER_SNAPSHOT_BATCH):
                part = CacheChange(what, group, nodes[start : start + _NODES_PER_SNAPSHOT_BATCH])
                yield self._encoder.encode(ts, self._describer.events([part]))

    def _see_to_snapshot(self, answers: Answers) -> None:
        now_s = time.monotonic()
        if answers.want_snapshot and not self._snapshot_asked and now_s >= self._snapshot_at_s:
            self._snapshot_asked, self._snapshot_at_s = True, now_s + _SNAPSHOT_INTERVAL_S
            self._ask_for_snapshot()

    def _tell_of_dropped(self, num_dropped: int) -> None:
        """`num_dropped` batches, in all, were dropped before what is published next."""
        num_new = num_dropped - self._num_dropped_told
        if num_new <= 0:
            return
        self._num_dropped_told = num_dropped
        first = self._next_sequence
        self._next_sequence += num_new
        logger.warning("kv_events_dropped reason=queue_full batches=%d total=%d", num_new, num_dropped)
        self._publish(time.time(), [], EventsDropped(first, self._next_sequence - 1))

    def _publish(self, ts: float, events: list[KVEvent], dropped: EventsDropped | None = None) -> None:
        sequence = self._next_sequence
        self._next_sequence += 1
        if self.num_batches == 0 and AllBlocksCleared() not in events[:1]:
            # Who followed an engine that was here before learns that it is gone.
            events = [AllBlocksCleared(), *events]
        self.num_batches += 1
        payload = self._encoder.encode(ts, events, dropped=dropped)
        self._buffer.append((sequence, payload))
        message = (self._topic, encode_number(sequence), payload)
        try:
            self._pub.send_multipart(message, zmq.DONTWAIT)
        except zmq.Again:
            self._note_full_subscriber(sequence)
            # The others get it.
            self._pub.setsockopt(zmq.XPUB_NODROP, 0)
            self._pub.send_multipart(message, zmq.DONTWAIT)
            self._pub.setsockopt(zmq.XPUB_NODROP, 1)

    def _note_full_subscriber(self, sequence: int) -> None:
        self._num_refused += 1
        first = sequence if self._reminder is None else self._reminder.first_sequence
        self._reminder = _Reminder(first, time.monotonic() + _FIRST_REMINDER_S, _FIRST_REMINDER_S)
        logger.warning("kv_events_dropped reason=subscriber_full sequence=%d total=%d", sequence, self._num_refused)

    def _remind(self) -> None:
        """Tell whoever could not be reached, by now or later, that something is missing."""
        reminder = self._reminder
        if reminder is None or time.monotonic() < reminder.at_s:
            return
        delay_s = 2 * reminder.delay_s
        is_last = delay_s > _LAST_REMINDER_S
        self._reminder = None if is_last else _Reminder(reminder.first_sequence, time.monotonic() + delay_s, delay_s)
        self._publish(time.time(), [], EventsDropped(reminder.first_sequence, self._next_sequence - 1))


class _Reminder(NamedTuple):
    first_sequence: int
    at_s: float
    delay_s: float


def _attach(made: zmq.Socket[bytes], endpoint: str, name: str, *, binds: bool) -> None:
    try:
        if binds:
            check_listenable(endpoint, insecure=True)
            made.bind(endpoint)
        else:
            made.connect(endpoint)
    except (ValueError, OSError) as error:
        raise InvalidConfigError(f"kv_events_config.{name}: {error}") from error
    if binds and is_tcp(endpoint) and tcp_address(endpoint).host not in _LOOPBACK:
        # There are no keys, and token ids and salts in it.
        logger.warning("endpoint_insecure endpoint=%s", endpoint)
