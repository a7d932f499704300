"""Following a publisher that is not ours: it keeps no promise but the peer's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from ipc.kv_events import (
    END_OF_ANSWER,
    AllBlocksCleared,
    BatchEncoder,
    BlockRemoved,
    EventsDropped,
    KVEventSubscriber,
    NumberedBatch,
)


class Peer:
    """Publishes as vLLM does. Batch n tells that block n was removed. `buffer` is what it can replay."""

    def __init__(self, directory: Path) -> None:
        self.endpoint, self.replay_endpoint = f"ipc://{directory}/pub", f"ipc://{directory}/replay"
        self.start()

    def start(self) -> None:
        self.buffer: dict[int, bytes] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = self._context.socket(zmq.XPUB)
        self._pub.bind(self.endpoint)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(self.replay_endpoint)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def let_subscribe(self) -> None:
        assert self._pub.poll(60_000)
        assert self._pub.recv()[:1] == b"\1"

    def has_news(self) -> bool:
        """Of somebody who subscribes."""
        return bool(self._pub.poll(0))

    def publish(self, *sequences: int, silently: bool = False) -> None:
        """`silently`: as if it had got lost on its way."""
        for sequence in sequences:
            payload = self.buffer[sequence] = BatchEncoder().encode(1.0, [BlockRemoved([sequence], None)])
            if not silently:
                self._pub.send_multipart([b"", sequence.to_bytes(8, "big"), payload])

    def publish_frames(self, *frames: bytes) -> None:
        self._pub.send_multipart(frames)

    def answer(self) -> None:
        while self._router.poll(0):
            identity, _, first = self._router.recv_multipart()
            for sequence, payload in self.buffer.items():
                if sequence >= int.from_bytes(first, "big"):
                    self._router.send_multipart([identity, b"", b"", sequence.to_bytes(8, "big"), payload])
            self._router.send_multipart([identity, b"", b"", END_OF_ANSWER, b""])


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    made = Peer(tmp_path)
    yield made
    made.close()


@pytest.fixture
def subscribe() -> Iterator[Callable[..., KVEventSubscriber]]:
    made: list[KVEventSubscriber] = []

    def subscribe(*arguments: str, **options: float) -> KVEventSubscriber:
        made.append(KVEventSubscriber(*arguments, **{"check_interval_s": 0.1} | options))  # type: ignore[arg-type]
        return made[-1]

    yield subscribe
    for subscriber in made:
        subscriber.close()


def told(batches: list[NumberedBatch]) -> list[object]:
    """Numbers of batches, what was lost in between, and `AllBlocksCleared` where all begins again."""
    what: list[object] = []
    for sequence, batch in batches:
        if batch.dropped is not None:
            what.append(batch.dropped)
        elif sequence is None:
            what += batch.events
        else:
            assert batch.events == [BlockRemoved([sequence], None)]
            what.append(sequence)
    return what


def follow(subscriber: KVEventSubscriber, peer: Peer, last: int) -> list[object]:
    """Until the batch with the number `last`."""
    heard: list[object] = []
    deadline_s = time.monotonic() + 60
    while last not in heard:
        assert time.monotonic() < deadline_s, f"only {heard}"
        heard += told(subscriber.receive(0.02))
        peer.answer()
    return heard


def test_without_a_replay_endpoint_a_loss_is_told(peer: Peer, subscribe: Callable[..., KVEventSubscriber]):
    subscriber = subscribe(peer.endpoint)
    peer.let_subscribe()
    peer.publish(0, 1, 2)
    assert follow(subscriber, peer, 2) == [0, 1, 2] and subscriber.is_complete
    peer.publish(5, 6)
    assert follow(subscriber, peer, 6) == [EventsDropped(3, 4), 5, 6]
    assert not subscriber.is_complete and subscriber.num_lost == 2
    # It has begun again.
    peer.publish(0, 1)
    assert follow(subscriber, peer, 1) == [AllBlocksCleared(), 0, 1] and subscriber.is_complete


def test_whoever_comes_late_is_told_so(peer: Peer, subscribe: Callable[..., KVEventSubscriber]):
    subscriber = subscribe(peer.endpoint)
    peer.let_subscribe()
    peer.publish(7)
    assert follow(subscriber, peer, 7) == [EventsDropped(0, 6), 7]
    assert not subscriber.is_complete


def test_what_was_missed_is_replayed(peer: Peer, subscribe: Callable[..., KVEventSubscriber]):
    peer.publish(0, 1, 2, silently=True)
    subscriber = subscribe(peer.endpoint, peer.replay_endpoint)
    peer.let_subscribe()
    assert follow(subscriber, peer, 2) == [0, 1, 2] and subscriber.is_complete
    peer.publish(3, 4, silently=True)
    peer.publish(5, 6)
    assert follow(subscriber, peer, 6) == [3, 4, 5, 6]
    # The last ones, behind which nothing comes.
    peer.publish(7, 8, silently=True)
    assert follow(subscriber, peer, 8) == [7, 8]
    assert subscriber.is_complete and subscriber.num_lost == subscriber.num_snapshots == 0


def test_what_is_not_replayed_is_told(peer: Peer, subscribe: Callable[..., KVEventSubscriber]):
    subscriber = subscribe(peer.endpoint, peer.replay_endpoint)
    peer.let_subscribe()
    peer.publish(0, 1, 2)
    assert follow(subscriber, peer, 2) == [0, 1, 2]
    peer.publish(3, 4, 5, silently=True)
    del peer.buffer[3], peer.buffer[4]
    peer.publish(6)
    assert follow(subscriber, peer, 6) == [EventsDropped(3, 4), 5, 6]
    assert not subscriber.is_complete and subscriber.num_lost == 2


def test_a_peer_that_was_restarted_has_nothing_yet(peer: Peer, subscribe: Callable[..., KVEventSubscriber]):
    subscriber = subscribe(peer.endpoint, peer.replay_endpoint)
    peer.let_subscribe()
    peer.publish(0, 1, 2, 3)
    assert follow(subscriber, peer, 3) == [0, 1, 2, 3]
    peer.close()
    peer.start()
    peer.publish(0, 1, silently=True)
    # Its socket subscribes again when it is looked at.
    while not peer.has_news():
        assert subscriber.receive(0.02) == []
    peer.let_subscribe()
    peer.publish(2)
    assert follow(subscriber, peer, 2) == [AllBlocksCleared(), 0, 1, 2] and subscriber.is_complete


def test_whoever_was_restarted_before_it_answered_is_asked_again(
    peer: Peer, subscribe: Callable[..., KVEventSubscriber]
):
    subscriber = subscribe(peer.endpoint, peer.replay_endpoint)
    peer.let_subscribe()
    assert subscriber.receive(0.05) == []
    peer.close()
    peer.start()
    while not peer.has_news():
        assert subscriber.receive(0.02) == []
    peer.publish(0)
    assert follow(subscriber, peer, 0) == [0]
    assert subscriber.num_unanswered == 0


def test_what_is_no_batch_is_counted_and_told(peer: Peer, subscribe: Callable[..., KVEventSubscriber]):
    subscriber = subscribe(peer.endpoint)
    peer.let_subscribe()
    peer.publish(0)
    peer.publish_frames(b"", b"2")
    peer.publish_frames(b"", b"short", b"")
    peer.publish_frames(b"", (1).to_bytes(8, "big"), b"\xc1")
    peer.publish(2)
    assert follow(subscriber, peer, 2) == [0, EventsDropped(1, 1), 2]
    assert subscriber.num_unreadable == 3 and not subscriber.is_complete


def test_nothing_comes_if_nobody_answers_and_that_is_counted(
    peer: Peer, subscribe: Callable[..., KVEventSubscriber], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("ipc.kv_events.subscriber._ANSWER_TIMEOUT_S", 0.1)
    subscriber = subscribe(peer.endpoint, peer.replay_endpoint)
    peer.let_subscribe()
    peer.publish(0)
    while subscriber.num_unanswered < 2:
        assert subscriber.receive(0.05) == []
    assert follow(subscriber, peer, 0) == [0]
