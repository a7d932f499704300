"""An engine behind a socket serves several frontends, and outlives whatever they do."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from engine_core.config import EngineConfig
from engine_core.engine import EngineCore
from engine_core.frontend_link import LinkSettings
from engine_core.server import EngineCoreServer
from ipc.codec import PROTOCOL_VERSION, encode, pack_header
from ipc.messages import (
    AbortRequests,
    AddRequest,
    EngineOutputs,
    EngineRequest,
    Goodbye,
    Heartbeat,
    Hello,
    Refused,
    SamplingParams,
    Welcome,
)
from tests.fake_runner import FakeRunner, continuation
from tests.wire_peers import FAST, BareFrontend, is_idle, private_endpoint, running_server, wait_until

Connect = Callable[..., BareFrontend]


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return private_endpoint(tmp_path)


@pytest.fixture
def connect(endpoint: str) -> Iterator[Connect]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield lambda **options: BareFrontend(context, endpoint, **options)
    context.destroy(linger=0)


def test_the_handshake_tells_capabilities_and_epoch(endpoint: str, connect: Connect) -> None:
    with running_server(endpoint) as server:
        frontend = connect()
        assert frontend.hello().capabilities == server.engine.capabilities
        assert frontend.epoch == server.link.epoch != 0
        # A retried hello is answered again.
        frontend.hello()


def test_tokens_arrive_complete_and_in_order(endpoint: str, connect: Connect) -> None:
    with running_server(endpoint) as server:
        frontend = connect()
        frontend.hello()
        prompts = {f"r{n}": list(range(1, 2 + n)) for n in range(20)}
        for request_id, prompt in prompts.items():
            frontend.add(request_id, prompt, 30)
        for request_id, (tokens, last) in frontend.finish(*prompts).items():
            assert tokens == continuation(prompts[request_id], 30)
            assert last.finish_reason == "length"
        wait_until(lambda: is_idle(server.engine))


def test_one_message_per_step(endpoint: str, connect: Connect) -> None:
    with running_server(endpoint, step_s=0.1):
        frontend = connect()
        frontend.hello()
        for n in range(3):
            frontend.add(f"r{n}", [n + 1], 5)
        messages = [frontend.receive(EngineOutputs) for _ in range(5)]
        assert [len(message.outputs) for message in messages if isinstance(message, EngineOutputs)][-1] == 3


def test_two_frontends_may_use_the_same_id(endpoint: str, connect: Connect) -> None:
    with running_server(endpoint, step_s=0.002):
        first, second = connect(), connect()
        for frontend, token in ((first, 1), (second, 2)):
            frontend.hello()
            frontend.add("same", [token], 50)
        # An abort of one leaves the other alone.
        third = connect()
        third.hello()
        third.add("same", [3], 50)
        third.send(AbortRequests(["same"]))
        for frontend, token in ((first, 1), (second, 2)):
            assert frontend.finish("same")["same"][0] == continuation([token], 50)


def test_a_duplicate_id_is_refused_while_the_first_is_unfinished(endpoint: str, connect: Connect) -> None:
    with running_server(endpoint, step_s=0.01) as server:
        frontend = connect()
        frontend.hello()
        frontend.add("r", [1], 50)
        frontend.add("r", [2], 50)
        refusal = next(output for output in frontend.outputs() if output.error is not None)
        assert refusal.request_id == "r" and refusal.finish_reason == "error"
        assert refusal.error is not None and (refusal.error.code, refusal.error.param) == ("invalid", "request_id")
        # The first goes on to its end; then the id is free.
        assert frontend.finish("r")["r"][1].finish_reason == "length"
        frontend.add("r", [2], 3)
        assert frontend.finish("r")["r"][0] == continuation([2], 3)
        wait_until(lambda: is_idle(server.engine))


def test_an_impossible_request_is_refused_by_name(endpoint: str, connect: Connect) -> None:
    with running_server(endpoint) as server:
        frontend = connect()
        frontend.hello()
        frontend.add("empty", [])
        frontend.add("unknown token", [10**6])
        frontend.add("no tokens wanted", [1], 0)
        results = frontend.finish("empty", "unknown token", "no tokens wanted")
        errors = [last.error for _, last in results.values()]
        assert [(error.code, error.param) for error in errors if error] == [
            ("invalid", "prompt_token_ids"),
            ("invalid", "prompt_token_ids"),
            ("invalid", "max_tokens"),
        ]
        assert is_idle(server.engine)


def test_an_abort_ends_the_request_without_a_word(endpoint: str, connect: Connect) -> None:
    with running_server(endpoint, step_s=0.01) as server:
        frontend = connect()
        frontend.hello()
        frontend.add("r", [1], 10_000)
        next(frontend.outputs())
        frontend.send(AbortRequests(["unknown", "r"]))
        wait_until(lambda: is_idle(server.engine))
        frontend.add("r", [5], 5)
        assert frontend.finish("r")["r"][1].finish_reason == "length"


def test_messages_of_another_epoch_are_dropped_and_counted(endpoint: str, connect: Connect) -> None:
    with running_server(endpoint) as server:
        frontend = connect()
        frontend.hello()
        frontend.send(AddRequest(EngineRequest("old", [1], SamplingParams(max_tokens=3))), epoch=frontend.epoch ^ 1)
        frontend.send(AddRequest(EngineRequest("old", [1], SamplingParams(max_tokens=3))), epoch=0)
        frontend.add("new", [1], 3)
        assert frontend.finish("new")["new"][0] == continuation([1], 3)
        assert server.link.drops.counts == {"stale_epoch": 2}


def test_another_protocol_version_is_refused_with_the_reason(endpoint: str, connect: Connect) -> None:
    with running_server(endpoint):
        stranger = connect()
        stranger.socket.send_multipart([pack_header(0, version=PROTOCOL_VERSION + 1), b"\xc1"])
        refused = stranger.receive()
        assert isinstance(refused, Refused)
        assert refused.reason == f"the engine speaks protocol {PROTOCOL_VERSION}, the frontend {PROTOCOL_VERSION + 1}"
        frontend = connect()
        frontend.hello()


def test_a_frontend_without_a_session_is_told_so(endpoint: str, connect: Connect) -> None:
    with running_server(endpoint) as server:
        frontend = connect()
        frontend.hello()
        frontend.send(Goodbye())
        frontend.add("r", [1])
        assert isinstance(frontend.receive(), Goodbye)
        assert server.link.drops.counts == {"no_session": 1}
        frontend.hello()


@pytest.mark.parametrize("way", ["goodbye", "hello", "disconnect"])
def test_who_leaves_leaves_nothing_behind(endpoint: str, connect: Connect, way: str) -> None:
    with running_server(endpoint, step_s=0.005) as server:
        stays, leaves = connect(), connect()
        stays.hello()
        leaves.hello()
        for n in range(5):
            leaves.add(f"r{n}", [n + 1], 50_000)
        stays.add("r0", [9], 100)
        next(leaves.outputs())
        if way == "disconnect":
            leaves.socket.close(linger=0)
        else:
            leaves.send(Goodbye() if way == "goodbye" else Hello())
        assert stays.finish("r0")["r0"][0] == continuation([9], 100)
        wait_until(lambda: is_idle(server.engine))


def test_a_silent_frontend_is_given_up(endpoint: str, connect: Connect) -> None:
    settings = LinkSettings(heartbeat_interval_s=0.1, frontend_timeout_s=1.0)
    with running_server(endpoint, step_s=0.01, settings=settings) as server:
        silent, alive = connect(), connect()
        silent.hello()
        alive.hello()
        silent.add("r", [1], 50_000)
        alive.add("r", [2], 50_000)
        for _ in range(30):
            alive.send(Heartbeat())
            time.sleep(0.05)
        assert isinstance(silent.receive(Goodbye), Goodbye)
        assert server.engine.stats().num_running == 1
        assert alive.receive(Goodbye, timeout_s=0.1) is None


def test_heartbeats_come_however_long_a_step_takes(endpoint: str, connect: Connect) -> None:
    with running_server(endpoint, step_s=1.5):
        frontend = connect()
        frontend.hello()
        frontend.add("r", [1], 1)
        time.sleep(0.2)
        num_heartbeats = 0
        while not isinstance(message := frontend.receive(object), EngineOutputs):
            num_heartbeats += isinstance(message, Heartbeat)
        assert num_heartbeats >= 5


def test_a_frontend_that_does_not_read_loses_its_requests_but_no_word(endpoint: str, connect: Connect) -> None:
    settings = LinkSettings(heartbeat_interval_s=0.1, queue_messages=4, max_backlog_messages=20)
    with running_server(endpoint, settings=settings) as server:
        slow, quick = connect(queue_messages=4), connect()
        slow.hello()
        quick.hello()
        prompts = {f"r{n}": [n + 1] for n in range(10)}
        for request_id, prompt in prompts.items():
            slow.add(request_id, prompt, 60_000)
        quick.add("q", [7], 500)
        assert quick.finish("q")["q"][0] == continuation([7], 500)
        wait_until(lambda: is_idle(server.engine))
        # While nothing can be said to it, it gets nothing new either.
        slow.add("one more", [1])
        results = slow.finish(*prompts, "one more")
        for request_id, (tokens, last) in results.items():
            assert last.error is not None and last.error.code == "overloaded"
            if request_id != "one more":
                assert last.finish_reason == "abort"
                assert 20 < len(tokens) < 60_000
                assert tokens == continuation(prompts[request_id], len(tokens))
        # Having read everything, it is as good as any other.
        slow.add("again", [3], 5)
        assert slow.finish("again")["again"][0] == continuation([3], 5)


def test_a_frontend_that_sends_without_end_and_never_reads_is_given_up(endpoint: str, connect: Connect) -> None:
    settings = LinkSettings(heartbeat_interval_s=0.1, queue_messages=4, max_backlog_messages=20)
    with running_server(endpoint, settings=settings) as server:
        rude = connect(queue_messages=4)
        rude.hello()
        padding = "x" * 10_000  # fills the kernel's socket buffer, too
        for n in range(500):
            rude.add(f"{n}{padding}", [])
        wait_until(lambda: server.link.drops.counts["no_session"] > 0)
        assert is_idle(server.engine)


def test_thousands_of_malformed_messages_do_no_harm(endpoint: str, connect: Connect) -> None:
    rng = random.Random(0)
    with running_server(endpoint) as server:
        hostile, frontend = connect(), connect()
        hostile.hello()
        frontend.hello()
        good = encode(AddRequest(EngineRequest("r", [1, 2, 3], SamplingParams(max_tokens=2))), hostile.epoch)
        for n in range(4000):
            frames = [bytearray(frame) for frame in good]
            frame = frames[rng.randrange(2)] if n % 2 else frames[1]
            for _ in range(rng.randint(1, 5)):
                frame[rng.randrange(len(frame))] = rng.randrange(256)
            if n % 7 == 0:
                frames = [rng.randbytes(rng.randrange(40)) for _ in range(rng.randrange(1, 5))]
            hostile.socket.send_multipart(frames)
            if n % 100 == 0:
                while hostile.receive(object, timeout_s=0.001) is not None:
                    pass
        deep = b"\x92\xa5hello" + b"\x91" * 100_000
        hostile.socket.send_multipart([pack_header(hostile.epoch), deep])
        hostile.socket.send_multipart([pack_header(hostile.epoch), msgspec.msgpack.encode(["hello"]), *[b""] * 2000])
        frontend.add("r", [1, 2, 3], 50)
        assert frontend.finish("r")["r"][0] == continuation([1, 2, 3], 50)
        wait_until(lambda: server.link.drops.counts["frames"] == 1)
        assert server.link.drops.counts["body"] > 1000
        assert server.link.drops.counts["header"] > 100
        hostile.socket.close(linger=0)
        wait_until(lambda: is_idle(server.engine))


def test_stopping_says_goodbye_after_what_was_published(endpoint: str, connect: Connect) -> None:
    server = EngineCoreServer(EngineCore(EngineConfig(), FakeRunner(step_s=0.01)), endpoint, FAST)
    exit_codes: list[int] = []
    thread = threading.Thread(target=lambda: exit_codes.append(server.run()))
    thread.start()
    frontend = connect()
    frontend.hello()
    frontend.add("r", [1], 10_000)
    next(frontend.outputs())
    server.stop()
    while isinstance(message := frontend.receive(), EngineOutputs):
        pass
    assert isinstance(message, Goodbye)
    thread.join(20)
    assert exit_codes == [0]


class BrokenEngine(EngineCore):
    def step(self) -> EngineOutputs:
        raise RuntimeError("an invariant does not hold")


def test_a_broken_engine_says_goodbye_and_exits_with_an_error(endpoint: str, connect: Connect) -> None:
    server = EngineCoreServer(BrokenEngine(EngineConfig(), FakeRunner()), endpoint, FAST)
    exit_codes: list[int] = []
    thread = threading.Thread(target=lambda: exit_codes.append(server.run()))
    thread.start()
    frontend = connect()
    frontend.hello()
    frontend.add("r", [1])
    assert isinstance(frontend.receive(), Goodbye)
    thread.join(20)
    assert exit_codes == [1]


def test_an_idle_engine_sleeps(endpoint: str, connect: Connect) -> None:
    with running_server(endpoint):
        frontend = connect()
        assert isinstance(frontend.hello(), Welcome)
        cpu_s, wall_s = time.process_time(), time.monotonic()
        time.sleep(1.0)
        assert time.process_time() - cpu_s < 0.3 * (time.monotonic() - wall_s)
