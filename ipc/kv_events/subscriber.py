"""The consumer's end: the batches of one engine, in order, and none missing if the engine can help it.

Whoever follows a PUB socket loses what is published before it is connected, while it is not, and when it reads too
slowly. Here every such loss ends in one of two ways: the missing batches are sent again (replay), or the whole table is
(snapshot). What shows a loss is a number that is not the next one, a connection that was interrupted, or, when nothing
arrives for some time, the publisher's answer to the question whether there is more. An engine that was started again
counts from 0 and has another epoch; its table is empty.

Publishers of peers tell no epoch and make no snapshots. Of those, what is not replayed is lost, which is told.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from .events import AllBlocksCleared, EventsDropped, KVEventBatch, KVEventError, decode_batch
from .requests import (
    END_OF_ANSWER,
    NUMBER_BYTES,
    SNAPSHOT_REQUEST,
    ReplayRequest,
    SnapshotEnd,
    SnapshotRequest,
    decode_number,
)

# While an answer is awaited. What is not held is replayed later.
_MAX_HELD_BATCHES = 100_000
# From one message of an answer to the next. A snapshot waits for the engine's present step.
_ANSWER_TIMEOUT_S = 10.0
_HEARTBEAT_MS = 2000


class NumberedBatch(NamedTuple):
    """`sequence` is None where the batch was not published: it is part of a snapshot, of which the first begins with
    `AllBlocksCleared`, or the subscriber itself tells of a loss (`batch.dropped`) or of an engine that is new.
    """

    sequence: int | None
    batch: KVEventBatch


class KVEventSubscriber:
    """Follows one engine's events. For one thread at a time; close it, or use it as a context manager.

    Args:
        endpoint: of its PUB socket, to connect to; with `bind`, to be connected to.
        replay_endpoint: of its replay socket. Without one, losses can be noticed but not mended.
        topic: what the publisher's topic begins with.
        check_interval_s: how long it may be quiet before the publisher is asked whether there is more.

    Attributes:
        is_complete: whether the batches handed out make the whole table. False before the first, and after a loss that
            could not be mended: blocks may be gone that seem to be there, and the other way round, until all are
            cleared.
        num_lost: batches that never came, not even by replay. Those that a snapshot stands for are not counted.
        num_replays: requests for missing batches that were answered with some.
        num_snapshots: how often the table was made anew.
        num_unreadable: messages that are no batches.
        num_unanswered: requests that nobody answered in time.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        bind: bool = False,
        check_interval_s: float = 1.0,
    ) -> None:
        self.is_complete = False
        self.num_lost = 0
        self.num_replays = 0
        self.num_snapshots = 0
        self.num_unreadable = 0
        self.num_unanswered = 0
        self._replay_endpoint = replay_endpoint
        self._check_interval_s = check_interval_s
        # The number of the next batch; the publisher's epoch, if it has told.
        self._expected: int | None = None
        self._epoch: bytes | None = None
        self._was_interrupted = False
        self._ready: list[NumberedBatch] = []
        # What is being asked, what of the answer has come, and what was published meanwhile, by number.
        self._asked: ReplayRequest | SnapshotRequest | None = None
        self._answer: list[tuple[int, bytes]] = []
        self._held: dict[int, bytes] = {}
        self._act_at_s = 0.0

        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer: zmq.Socket[bytes] | None = None
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.RCVHWM, _MAX_HELD_BATCHES)
        self._sub.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self._sub.setsockopt(zmq.IPV6, 1)
        self._monitor: Any = self._sub.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._sub.subscribe(topic)
        if bind:
            self._sub.bind(endpoint)
        else:
            self._sub.connect(endpoint)
        if replay_endpoint is not None:
            self._ask(SnapshotRequest())

    def __enter__(self) -> KVEventSubscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._sub.disable_monitor()
        self._monitor.close()
        self._context.destroy(linger=0)

    def receive(self, timeout_s: float) -> list[NumberedBatch]:
        """What is to be applied next, in order; empty if nothing has come in that time.

        Raises:
            KVEventError: a snapshot cannot be read.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._wait(deadline_s)
            # In this order: what comes after an interruption is not taken for the continuation of what came before.
            self._note_interruptions()
            self._take_live()
            self._take_answer()
            if time.monotonic() >= self._act_at_s:
                self._be_impatient()
            if self._ready or time.monotonic() >= deadline_s:
                ready, self._ready = self._ready, []
                return ready

    def _wait(self, deadline_s: float) -> None:
        poller = zmq.Poller()
        for polled in (self._sub, self._monitor, self._dealer):
            if polled is not None:
                poller.register(polled, zmq.POLLIN)
        poller.poll(math.ceil(max(0.0, min(deadline_s, self._act_at_s) - time.monotonic()) * 1000))

    def _note_interruptions(self) -> None:
        interrupted = False
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            interrupted = True
        if interrupted:
            self._was_interrupted = True
            if self._asked is None:
                self._check()
            else:
                # Whoever was asked may be gone, and what has come of the answer be out of date.
                self._ask_anew(self._asked)

    def _take_live(self) -> None:
        while True:
            try:
                frames = self._sub.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            if len(frames) != 3 or len(frames[1]) != NUMBER_BYTES:
                self.num_unreadable += 1
            else:
                self._take(decode_number(frames[1]), frames[2])

    def _take(self, sequence: int, payload: bytes) -> None:
        if self._asked is None:
            self._act_at_s = time.monotonic() + self._check_interval_s
            if sequence == self._expected:
                self._hand_out(sequence, payload)
                return
            if self._epoch is None and self._has_begun_again(sequence):
                self._begin_again()
        if self._replay_endpoint is None:
            self._go_on(sequence)
            self._hand_out(sequence, payload)
            return
        if len(self._held) < _MAX_HELD_BATCHES:
            self._held[sequence] = payload
        self._check()

    def _has_begun_again(self, sequence: int) -> bool:
        """By all signs but an epoch. A number that was there before is that of a batch that was replayed, too."""
        if self._expected is None or sequence >= self._expected:
            return False
        return sequence == 0 or self._was_interrupted or self._replay_endpoint is None

    def _begin_again(self) -> None:
        self._expected, self._was_interrupted = 0, False
        self._tell(KVEventBatch(time.time(), [AllBlocksCleared()]))

    def _go_on(self, sequence: int) -> None:
        """From here on, though what is before it has not come."""
        if sequence > (first := self._expected or 0):
            self.num_lost += sequence - first
            self.is_complete = False
            self._tell(KVEventBatch(time.time(), [], dropped=EventsDropped(first, sequence - 1)))
        self._expected = sequence

    def _tell(self, batch: KVEventBatch) -> None:
        self._ready.append(NumberedBatch(None, batch))

    def _hand_out(self, sequence: int, payload: bytes) -> None:
        try:
            batch = decode_batch(payload)
        except KVEventError:
            self.num_unreadable += 1
            self._go_on(sequence + 1)
            return
        self._expected, self._was_interrupted = sequence + 1, False
        self.is_complete |= sequence == 0 or AllBlocksCleared() in batch.events
        self._ready.append(NumberedBatch(sequence, batch))

    def _be_impatient(self) -> None:
        if self._asked is None:
            self._act_at_s = time.monotonic() + self._check_interval_s
            self._check()
            return
        self.num_unanswered += 1
        self._ask_anew(self._asked)

    def _ask_anew(self, what: ReplayRequest | SnapshotRequest) -> None:
        # A new socket: what comes as an answer after all is not taken for one to what is asked now.
        assert self._dealer is not None
        self._dealer.close(linger=0)
        self._dealer = None
        self._ask(what)

    def _check(self) -> None:
        """Ask whether this is all, and still the same engine."""
        if self._asked is None and self._replay_endpoint is not None:
            assert self._expected is not None
            self._ask(ReplayRequest(self._expected, self._epoch))

    def _ask(self, what: ReplayRequest | SnapshotRequest) -> None:
        assert self._replay_endpoint is not None
        if self._dealer is None:
            self._dealer = self._context.socket(zmq.DEALER)
            self._dealer.setsockopt(zmq.RCVHWM, 0)
            self._dealer.setsockopt(zmq.IPV6, 1)
            self._dealer.connect(self._replay_endpoint)
        self._dealer.send_multipart([b"", what.encode() if isinstance(what, ReplayRequest) else SNAPSHOT_REQUEST])
        self._asked, self._answer = what, []
        self._act_at_s = time.monotonic() + _ANSWER_TIMEOUT_S

    def _take_answer(self) -> None:
        while self._asked is not None and self._dealer is not None:
            try:
                frames = self._dealer.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._act_at_s = time.monotonic() + _ANSWER_TIMEOUT_S
            if len(frames) != 4 or len(frames[2]) != NUMBER_BYTES:
                self.num_unreadable += 1
            elif frames[2] != END_OF_ANSWER:
                self._answer.append((decode_number(frames[2]), frames[3]))
            else:
                # So that what the answer holds as well is not taken for news later.
                self._take_live()
                self._use_answer(frames[3])

    def _use_answer(self, more: bytes) -> None:
        asked, answer, self._asked, self._answer = self._asked, self._answer, None, []
        self._act_at_s = time.monotonic() + self._check_interval_s
        if isinstance(asked, ReplayRequest):
            if asked.epoch is not None and more != asked.epoch:
                # Another engine; what is held may be of either.
                self._held.clear()
                self._ask(SnapshotRequest())
            elif asked.epoch is None and any(map(self._has_begun_again, self._held)):
                self._begin_again()
                self._ask(ReplayRequest(0))
            else:
                self.num_replays += bool(answer)
                self._merge(self._held | dict(answer), asked.first_sequence)
        elif (end := SnapshotEnd.decode(more)) is None:
            self._expected = 0
            self._ask(ReplayRequest(0))
        else:
            self._epoch, self._expected = end
            self._ready += [NumberedBatch(None, decode_batch(payload)) for _, payload in answer]
            self.is_complete = True
            self.num_snapshots += 1
            self._merge(self._held, None)

    def _merge(self, batches: Mapping[int, bytes], asked_from: int | None) -> None:
        """Hand out, in order, what was published and what was replayed from `asked_from` on."""
        self._held = {}
        for sequence in sorted(batches):
            assert self._expected is not None
            if sequence < self._expected:
                continue
            if sequence > self._expected and self._epoch is None:
                self._go_on(sequence)
            elif sequence > self._expected:
                # What did not come when it was asked for, nobody has any more.
                is_lost = asked_from == self._expected
                self._held = {number: batches[number] for number in batches if number > self._expected}
                self._ask(SnapshotRequest() if is_lost else ReplayRequest(self._expected, self._epoch))
                return
            self._hand_out(sequence, batches[sequence])
