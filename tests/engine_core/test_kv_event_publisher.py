"""Publishing KV events: the peer's bytes on real sockets, nothing lost in silence, and an engine that never waits."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from engine_core.config import EngineConfig, KVEventsConfig
from engine_core.engine import EngineCore
from engine_core.errors import InvalidConfigError
from engine_core.kv_events import publisher as publisher_module
from engine_core.kv_events.describe import EventDescriber
from engine_core.kv_events.publisher import KVEventPublisher
from engine_core.kv_events.recorder import cleared
from ipc.endpoints import socket_path
from ipc.kv_events import AllBlocksCleared, BlockStored, EventsDropped, KVEventTable, SnapshotEnd, decode_batch
from ipc.kv_events.requests import SNAPSHOT_REQUEST
from ipc.messages import GetStats, PrefixCacheWasReset, ResetPrefixCache, Stats
from tests.engine_core.kv_event_stack import BLOCK_SIZE, EventStack, consumer, event_stack, raw_socket, read_answer
from tests.fake_runner import FakeRunner
from tests.wire_peers import Connect, running_server, start_engine, wait_until

ORACLE = Path(__file__).parent.parent / "data" / "oracle" / "kv_event_vectors.json.gz"
LIVE: dict[str, Any] = json.loads(gzip.decompress(ORACLE.read_bytes()))["live"]


def frames(hex_frames: list[list[str]]) -> list[list[bytes]]:
    return [[bytes.fromhex(frame) for frame in message] for message in hex_frames]


def let_subscribe(stack: EventStack, sub: zmq.Socket[bytes]) -> None:
    """Returns when `sub` gets what is published from now on, and has read what came before; ahead of `start`."""
    num_sent = 0
    while not sub.poll(10):
        stack.publisher._pub.send_multipart([stack.events_config.topic.encode(), b"%d" % num_sent, b""])
        num_sent += 1
        assert num_sent < 2000, "its subscription did not arrive"
    while sub.recv_multipart()[1] != b"%d" % (num_sent - 1):
        pass


def test_a_live_stream_and_its_replay_have_the_frames_of_the_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    topic, buffer_steps = LIVE["topic"], LIVE["buffer_steps"]
    with event_stack(tmp_path, topic=topic, buffer_steps=buffer_steps) as stack:
        endpoint, replay_endpoint = stack.events_config.endpoint, stack.events_config.replay_endpoint
        with raw_socket(zmq.SUB, endpoint) as sub, raw_socket(zmq.DEALER, replay_endpoint) as dealer:
            let_subscribe(stack, sub)
            recorded = frames(LIVE["pub_frames_hex"])
            for index in range(len(recorded)):
                monkeypatch.setattr(publisher_module.time, "time", lambda now_s=float(index): now_s)
                stack.publisher.publish([cleared()])
            monkeypatch.undo()
            stack.publisher.start()
            assert [sub.recv_multipart() for _ in recorded] == recorded
            dealer.send_multipart([bytes.fromhex(frame) for frame in LIVE["replay_request_frames_hex"]])
            assert read_answer(dealer) == frames(LIVE["replay_from_3_as_seen_by_dealer_hex"])
            dealer.send_multipart([b"", b"\0" * 8])
            assert read_answer(dealer) == frames(LIVE["replay_from_0_as_seen_by_dealer_hex"])


def test_the_first_batch_says_that_nothing_of_an_earlier_engine_is_left(tmp_path: Path):
    with event_stack(tmp_path) as stack, raw_socket(zmq.DEALER, stack.events_config.replay_endpoint) as dealer:
        stack.publisher.start()
        stack.run(list(range(9)))
        dealer.send_multipart([b"", b"\0" * 8])
        first, _ = read_answer(dealer)
        cleared, stored = decode_batch(first[3]).events
        assert first[2] == b"\0" * 8 and cleared == AllBlocksCleared() and isinstance(stored, BlockStored)


def test_what_finds_the_queue_full_is_dropped_counted_and_told_of(tmp_path: Path):
    with event_stack(tmp_path, max_queue_size=10) as stack, raw_socket(zmq.SUB, stack.events_config.endpoint) as sub:
        let_subscribe(stack, sub)
        for _ in range(25):
            stack.publisher.publish([cleared()])
        assert stack.publisher.dropped_batches == {"queue_full": 15}
        stack.publisher.start()
        messages = [sub.recv_multipart() for _ in range(11)]
        # 10 … 24 are lost, 25 says so.
        assert [int.from_bytes(message[1], "big") for message in messages] == [*range(10), 25]
        lost = decode_batch(messages[-1][2])
        assert lost.dropped == EventsDropped(10, 24) and lost.events == []
        stack.publisher.publish([cleared()])
        assert int.from_bytes(sub.recv_multipart()[1], "big") == 26
        assert stack.publisher.num_batches == 12


def test_after_a_loss_a_consumer_gets_the_whole_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(publisher_module, "_SNAPSHOT_INTERVAL_S", 0.1)
    with event_stack(tmp_path, max_queue_size=2) as stack, consumer(stack.events_config) as router:
        stack.publisher.start()
        stack.run(list(range(40)))
        router.follow_until(lambda: router.subscriber.is_complete, stack.serve_snapshot)
        stalled = threading.Event()
        events = stack.engine.kv_describer.events
        stack.engine.kv_describer.events = lambda changes: stalled.wait(20) and events(changes)
        for index in range(20):
            stack.run([index] * 20)
        assert stack.publisher.dropped_batches["queue_full"] > 10
        stalled.set()
        router.follow_until(lambda: router.table.blocks.keys() == stack.hashes(), stack.serve_snapshot)
        assert router.subscriber.is_complete and router.subscriber.num_snapshots == 2
        # What follows is applied to it.
        stack.run(list(range(50, 90)))
        router.follow_until(lambda: router.table.blocks.keys() == stack.hashes(), stack.serve_snapshot)
        assert router.subscriber.num_snapshots == 2


def steps_of(stack: EventStack) -> list[int]:
    """What the engine computes, step by step, of prompts whose events fill any socket's buffers."""
    for index in range(150):
        stack.run([index] * 3 + list(range(20, 900)), max_tokens=3)
    return stack.runner.steps


def test_a_subscriber_that_does_not_read_slows_nobody_down(tmp_path: Path):
    quiet, stalled = tmp_path / "quiet", tmp_path / "stalled"
    quiet.mkdir()
    stalled.mkdir()
    with event_stack(quiet, num_blocks=256) as alone:
        alone.publisher.start()
        work = steps_of(alone)
    with (
        event_stack(stalled, num_blocks=256, hwm=10, buffer_steps=5) as stack,
        raw_socket(zmq.SUB, stack.events_config.endpoint, receive_messages=1) as sub,
        consumer(stack.events_config) as router,
    ):
        let_subscribe(stack, sub)
        stack.publisher.start()
        assert steps_of(stack) == work
        wait_until(lambda: stack.publisher.dropped_batches.get("subscriber_full", 0) >= 1)
        # A consumer that only looks now is in the same place, and has means.
        router.follow_until(lambda: router.table.blocks.keys() == stack.hashes(), stack.serve_snapshot)
        # The other one sees that numbers are missing, and is told: of more than those, if others lost some of theirs.
        seen: list[int] = []
        told: set[int] = set()
        missing: set[int] = set()
        while not missing or not missing <= told:
            assert sub.poll(60_000), "nobody said that something was lost"
            _, number, payload = sub.recv_multipart()
            seen.append(int.from_bytes(number, "big"))
            missing = set(range(seen[0], seen[-1])) - set(seen)
            if (dropped := decode_batch(payload).dropped) is not None:
                told |= set(range(dropped.first_sequence, dropped.last_sequence + 1))


def test_a_snapshot_stands_at_a_place_of_the_stream(tmp_path: Path):
    with event_stack(tmp_path) as stack, raw_socket(zmq.DEALER, stack.events_config.replay_endpoint) as dealer:
        stack.publisher.start()
        stack.run(list(range(41)))
        dealer.send_multipart([b"", SNAPSHOT_REQUEST])
        wait_until(stack.wanted.is_set)
        stack.serve_snapshot()
        at_that_time = stack.hashes()
        stack.run(list(range(50, 70)))
        *batches, end = read_answer(dealer)
        events = [event for batch in batches for event in decode_batch(batch[3]).events]
        assert events[0] == AllBlocksCleared()
        told = [
            block_hash for event in events[1:] if isinstance(event, BlockStored) for block_hash in event.block_hashes
        ]
        assert len(told) == len(set(told)) and set(told) == at_that_time
        place = SnapshotEnd.decode(end[3])
        assert place is not None and place.next_sequence == 1
        # Asked with this epoch, replay goes on from there; with another one it tells which it is.
        dealer.send_multipart([b"", (1).to_bytes(8, "big") + place.epoch])
        batch, end = read_answer(dealer)
        assert int.from_bytes(batch[2], "big") == 1 and end[3] == place.epoch
        dealer.send_multipart([b"", (0).to_bytes(8, "big") + b"another."])
        assert [message[3] for message in read_answer(dealer)] == [place.epoch]


def test_snapshots_are_made_one_for_all_who_ask_and_not_too_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(publisher_module, "_SNAPSHOT_INTERVAL_S", 0.1)
    with event_stack(tmp_path) as stack, raw_socket(zmq.DEALER, stack.events_config.replay_endpoint) as dealer:
        stack.publisher.start()
        stack.run(list(range(41)))
        started_s = time.monotonic()
        num_made = 0
        with raw_socket(zmq.DEALER, stack.events_config.replay_endpoint) as other:
            for _ in range(3):
                dealer.send_multipart([b"", SNAPSHOT_REQUEST])
                other.send_multipart([b"", SNAPSHOT_REQUEST])
            for asked in [dealer] * 3 + [other] * 3:
                while not asked.poll(5):
                    num_made += stack.wanted.is_set()
                    stack.serve_snapshot()
                assert len(read_answer(asked)) == 3
        assert num_made < 6
        assert num_made <= 1 + (time.monotonic() - started_s) / 0.1


def test_whoever_asks_and_does_not_read_delays_nobody(tmp_path: Path):
    with event_stack(tmp_path, num_blocks=256) as stack:
        stack.publisher.start()
        for index in range(300):
            stack.run([index % 40, index, *range(100, 900)])
        wait_until(lambda: stack.publisher.num_batches == 300)
        replay_endpoint = stack.events_config.replay_endpoint
        with (
            raw_socket(zmq.DEALER, replay_endpoint, receive_messages=1) as lazy,
            raw_socket(zmq.DEALER, replay_endpoint) as eager,
        ):
            for _ in range(10):
                lazy.send_multipart([b"", b"\0" * 8])
            eager.send_multipart([b"", b"\0" * 8])
            assert len(read_answer(eager)) == 301
            # In the end it gets what it asked for.
            assert len(read_answer(lazy)) == 301


@pytest.mark.parametrize("request_frames", [[b""], [b"", b"abc"], [b"x", b"\0" * 8], [b"", b"", b"\0" * 8]])
def test_requests_that_are_none_are_passed_over(tmp_path: Path, request_frames: list[bytes]):
    with event_stack(tmp_path) as stack, raw_socket(zmq.DEALER, stack.events_config.replay_endpoint) as dealer:
        stack.publisher.start()
        dealer.send_multipart(request_frames)
        dealer.send_multipart([b"", b"\0" * 8])
        assert len(read_answer(dealer)) == 1


def served(tmp_path: Path, **settings: Any) -> tuple[KVEventsConfig, EngineCore]:
    tmp_path.chmod(0o700)
    events_config = KVEventsConfig(
        enable_kv_cache_events=True,
        endpoint=f"ipc://{tmp_path}/events",
        replay_endpoint=f"ipc://{tmp_path}/replay",
        **settings,
    )
    config = EngineConfig(block_size=BLOCK_SIZE, kv_events_config=events_config, kv_events_hashes="bytes")
    return events_config, EngineCore(config, FakeRunner(num_blocks=256, block_size=BLOCK_SIZE))


def test_an_engine_process_publishes_after_steps_and_when_it_is_reset_while_idle(
    tmp_path: Path, endpoint: str, connect: Connect
):
    config, engine = served(tmp_path)
    tree = engine._scheduler.kv.pool.tree
    with running_server(endpoint, engine=engine), consumer(config) as router:
        frontend = connect()
        frontend.hello()
        frontend.add("a", list(range(40)), 20)
        frontend.finish("a")
        router.follow_until(lambda: router.table.blocks.keys() == tree.copies().keys() != set())
        # The engine is idle, and late comers get the table nevertheless.
        with consumer(config) as late:
            late.follow_until(lambda: late.table.blocks.keys() == tree.copies().keys())
            assert late.subscriber.num_snapshots == 1
        frontend.send(ResetPrefixCache(1))
        assert isinstance(frontend.receive(PrefixCacheWasReset), PrefixCacheWasReset)
        router.follow_until(lambda: not router.table.blocks)
        assert router.batches[-1].batch.events == [AllBlocksCleared()]
        frontend.send(GetStats(2))
        answer = frontend.receive(Stats)
        assert isinstance(answer, Stats)
        assert answer.stats.kv_event_batches > 2 and answer.stats.kv_event_batches_dropped == {}


def test_a_restarted_engine_is_noticed(tmp_path: Path):
    """However far it has counted by the time it is heard of."""
    for num_prompts in (1, 3, 6):
        with event_stack(tmp_path) as stack, consumer(stack.events_config) as router:
            stack.publisher.start()
            for index in range(3):
                stack.run([index] * 20)
            router.follow_until(lambda: router.table.blocks.keys() == stack.hashes() != set(), stack.serve_snapshot)
            stack.publisher.stop()
            with event_stack(tmp_path) as restarted:
                for index in range(num_prompts):
                    restarted.run([7, index] + [8] * 20)
                restarted.publisher.start()
                router.follow_until(lambda: router.table.blocks.keys() == restarted.hashes(), restarted.serve_snapshot)
                assert router.subscriber.is_complete


def is_listening(endpoint: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(socket_path(endpoint))) == 0


def has_prompt(table: KVEventTable, prompt: list[int]) -> bool:
    """Whether it holds the whole blocks of this prompt and nothing else."""
    blocks = {tuple(prompt[start : start + 16]) for start in range(0, len(prompt) - 15, 16)}
    return {block.token_ids for block in table.blocks.values()} == blocks


def test_an_engine_process_that_was_killed_is_followed_when_it_is_started_again(
    tmp_path: Path, endpoint: str, connect: Connect
):
    config, _ = served(tmp_path)
    options = ("--config", msgspec.json.encode(EngineConfig(kv_events_config=config)).decode())
    with consumer(config) as router:
        for prompt in (list(range(64)), list(range(100, 200))):
            process = start_engine(endpoint, 0.0, *options)
            try:
                wait_until(lambda: is_listening(endpoint))
                frontend = connect()
                frontend.hello()
                frontend.add("a", prompt, 1)
                frontend.finish("a")
                router.follow_until(partial(has_prompt, router.table, prompt))
            finally:
                process.kill()
                process.wait()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "kv_events_config.endpoint: say where"),
        ({"publisher": "null", "endpoint": "tcp://127.0.0.1:1"}, "kv_events_config.publisher: null"),
        ({"endpoint": "ipc:///tmp/events"}, "kv_events_config.endpoint: /tmp has mode"),
    ],
)
def test_an_engine_process_that_could_not_publish_does_not_start(endpoint: str, settings: dict[str, Any], message: str):
    config = EngineConfig(kv_events_config=KVEventsConfig(enable_kv_cache_events=True, **settings))
    with (
        pytest.raises(InvalidConfigError, match=message),
        running_server(endpoint, engine=EngineCore(config, FakeRunner())),
    ):
        pass


def test_an_endpoint_in_use_is_named(tmp_path: Path):
    with event_stack(tmp_path) as stack:
        describer = EventDescriber(BLOCK_SIZE, (None,))
        with pytest.raises(InvalidConfigError, match=r"kv_events_config\.endpoint: .*cannot listen at ipc://"):
            KVEventPublisher(stack.events_config, describer, ask_for_snapshot=lambda: None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"buffer_steps": -1}, r"kv_events_config\.buffer_steps: must be in 0 … 2147483647, is -1"),
        ({"max_queue_size": 0}, r"kv_events_config\.max_queue_size: must be in 1 … 2147483647, is 0"),
        ({"endpoint": "tcp://x"}, r"kv_events_config\.endpoint: endpoint must be tcp://host:port"),
        ({"replay_endpoint": "inproc://x"}, r"kv_events_config\.replay_endpoint: endpoint must start with"),
        ({"no_such": 1}, "unknown field `no_such`"),
        ({"hwm": "many"}, "Expected `int`, got `str`"),
    ],
)
def test_impossible_settings_are_refused_by_name(settings: dict[str, Any], message: str):
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.json.decode(msgspec.json.encode(settings), type=KVEventsConfig)


@pytest.mark.parametrize(
    ("settings", "binds"),
    [
        ({"endpoint": "tcp://*:5557"}, True),
        ({"endpoint": "tcp://[::]:5557"}, True),
        ({"endpoint": "ipc:///run/x"}, True),
        ({"endpoint": "tcp://router:5557"}, False),
        ({"endpoint": "tcp://127.0.0.1:5557"}, False),
        ({"endpoint": "tcp://127.0.0.1:5557", "bind": True}, True),
        ({"endpoint": "ipc:///run/x", "bind": False}, False),
    ],
)
def test_endpoints_are_bound_or_connected_to_as_by_the_peer(settings: dict[str, Any], binds: bool):
    assert KVEventsConfig(**settings).binds is binds
