"""An engine, its publisher and consumers over real sockets, stepped by the test."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zmq

from engine_core import EngineConfig, EngineCore, EngineRequest, SamplingParams
from engine_core.config import KVEventsConfig
from engine_core.kv_events.publisher import KVEventPublisher
from ipc.kv_events import KVEventSubscriber, KVEventTable, NumberedBatch
from tests.checking_runner import CheckingRunner

BLOCK_SIZE = 4


class EventStack:
    """`publisher` is to be started. Snapshots are made between steps, as an engine process does it."""

    def __init__(self, directory: Path, num_blocks: int = 64, **settings: Any) -> None:
        directory.chmod(0o700)
        self.events_config = KVEventsConfig(
            enable_kv_cache_events=True,
            endpoint=f"ipc://{directory}/events",
            replay_endpoint=f"ipc://{directory}/replay",
            **settings,
        )
        config = EngineConfig(
            block_size=BLOCK_SIZE, kv_events_config=self.events_config, kv_events_hashes="bytes", max_num_seqs=4
        )
        self.runner = CheckingRunner(num_blocks, BLOCK_SIZE, max_model_len=num_blocks * BLOCK_SIZE)
        self.engine = EngineCore(config, self.runner)
        self.wanted = threading.Event()
        self.publisher = KVEventPublisher(
            self.events_config, self.engine.kv_describer, ask_for_snapshot=self.wanted.set
        )
        self._num_added = 0

    def add(self, prompt: list[int], max_tokens: int = 1) -> None:
        self._num_added += 1
        self.engine.add_request(
            EngineRequest(f"r{self._num_added}", prompt, SamplingParams(0.0, max_tokens=max_tokens))
        )

    def run(self, prompt: list[int], max_tokens: int = 1) -> None:
        self.add(prompt, max_tokens)
        while self.engine.has_unfinished_requests():
            self.engine.step()
            self.publish()

    def publish(self) -> None:
        recorder = self.engine.kv_recorder
        assert recorder is not None
        if recorder.has_changes:
            self.publisher.publish(recorder.take())
        self.serve_snapshot()

    def serve_snapshot(self) -> None:
        if self.wanted.is_set():
            self.wanted.clear()
            assert self.engine.kv_recorder is not None
            self.publisher.publish_snapshot(self.engine.kv_recorder.snapshot())

    def hashes(self) -> set[bytes]:
        copies = self.engine._scheduler.kv.pool.tree.copies()
        return {block_hash for block_hash, blocks in copies.items() if any(block.is_filled for block in blocks)}


class Consumer:
    """A subscriber, the table it makes, and the batches it got."""

    def __init__(self, config: KVEventsConfig, **settings: Any) -> None:
        assert config.endpoint is not None
        self.subscriber = KVEventSubscriber(
            config.endpoint, config.replay_endpoint, **{"check_interval_s": 0.2} | settings
        )
        self.table = KVEventTable()
        self.batches: list[NumberedBatch] = []

    def take(self, timeout_s: float = 0.0) -> None:
        for numbered in self.subscriber.receive(timeout_s):
            self.batches.append(numbered)
            self.table.apply(numbered.batch.events)

    def follow_until(self, condition: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None) -> None:
        deadline_s = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline_s, "it did not happen"
            self.take(0.02)
            meanwhile()


@contextlib.contextmanager
def event_stack(directory: Path, **settings: Any) -> Iterator[EventStack]:
    stack = EventStack(directory, **settings)
    try:
        yield stack
    finally:
        stack.publisher.stop()


@contextlib.contextmanager
def consumer(config: KVEventsConfig, **settings: Any) -> Iterator[Consumer]:
    made = Consumer(config, **settings)
    try:
        yield made
    finally:
        made.subscriber.close()


@contextlib.contextmanager
def raw_socket(kind: int, endpoint: str | None, *, receive_messages: int = 1000) -> Iterator[zmq.Socket[bytes]]:
    """A SUB socket gets everything."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = context.socket(kind)
    made.setsockopt(zmq.RCVHWM, receive_messages)
    if kind == zmq.SUB:
        made.subscribe(b"")
    assert endpoint is not None
    made.connect(endpoint)
    try:
        yield made
    finally:
        context.destroy(linger=0)


def read_answer(socket: zmq.Socket[bytes]) -> list[list[bytes]]:
    """All messages of one, the end included."""
    messages = []
    while not messages or messages[-1][2] != b"\xff" * 8:
        assert socket.poll(60_000), "the answer has no end"
        messages.append(socket.recv_multipart())
    return messages
