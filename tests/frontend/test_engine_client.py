"""The engine may be slow, killed, frozen, restarted or a stranger: streams end truthfully, and service comes back."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from engine_core.server import EngineCoreServer
from frontend.engine_client import EngineClient, RequestStream
from frontend.engine_errors import EngineUnavailableError, RequestRefusedError
from frontend.engine_session import EngineSession
from ipc.codec import PROTOCOL_VERSION, encode, pack_header
from ipc.messages import EngineOutputs, Goodbye, Heartbeat, Refused, WantFeatures, Welcome
from ipc.sequence import UNCOUNTED
from ipc.sockets import make_dealer
from ipc.vocabulary import EngineRequest, ExtraKeySpan, RequestError, RequestOutput, SamplingParams, WantedFeature
from tests.bare_engine import CAPABILITIES, BareEngine, keep_alive
from tests.fake_runner import continuation
from tests.mutations import mutate
from tests.pictures_in_prompts import Pictures, key_of, pictured
from tests.wire_peers import (
    ROOT,
    is_idle,
    private_endpoint,
    request,
    running_server,
    start_engine,
    wait_until,
)

StartEngine = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return private_endpoint(tmp_path)


@pytest.fixture
def engine_process(endpoint: str) -> Iterator[StartEngine]:
    processes: list[subprocess.Popen[bytes]] = []

    def start(step_s: float = 0.01) -> subprocess.Popen[bytes]:
        processes.append(start_engine(endpoint, step_s))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture
async def client(endpoint: str) -> AsyncIterator[EngineClient]:
    client = EngineClient(endpoint, heartbeat_interval_s=0.1, heartbeat_timeout_s=1.0)
    await client.start()
    yield client
    await client.close()


async def collect(stream: RequestStream) -> tuple[list[int], list[RequestOutput]]:
    outputs = [output async for output in stream]
    return [token for output in outputs for token in output.new_token_ids], outputs


async def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    await asyncio.to_thread(wait_until, condition, timeout_s)


async def test_several_continuations_come_as_one_stream_and_slow_readers_lose_none(
    endpoint: str, client: EngineClient
) -> None:
    with running_server(endpoint) as server:
        await client.wait_ready(10)
        params = SamplingParams(temperature=0.0, max_tokens=20, n=3)
        async with client.submit(EngineRequest("several", [1, 2, 3], params)) as stream:
            arrived: list[int] = []
            stream.on_arrival = lambda output: arrived.append(output.index)
            first = await anext(stream)
            # How much comes before the first is taken is up to the machine.
            waiting = [index for index in arrived if index != first.index]
            num_arrived = len(arrived)
            await until(lambda: client.num_in_flight == 0)
            outputs = [first] + [output async for output in stream]
        for index in range(3):
            own = [output for output in outputs if output.index == index]
            assert [token for output in own for token in output.new_token_ids] == continuation([1, 2, 3], 20)
            assert own[-1].finish_reason == "length"
        # What waited came as one item each, in the order of its first arrival.
        waiting = list(dict.fromkeys(waiting + arrived[num_arrived:]))
        assert [output.index for output in outputs if output is not first] == waiting
        assert is_idle(server.engine)


async def test_streams_deliver_every_token_in_order(endpoint: str, client: EngineClient) -> None:
    async def one(n: int) -> None:
        async with client.submit(request(f"r{n}", [n + 1, 5], 100)) as stream:
            tokens, outputs = await collect(stream)
        assert tokens == continuation([n + 1, 5], 100)
        assert [output.finish_reason for output in outputs][-1] == "length"
        assert all(output.new_token_ids for output in outputs)

    with running_server(endpoint, step_s=0.001) as server:
        await client.wait_ready(20)
        assert client.capabilities == server.engine.capabilities
        await asyncio.gather(*(one(n) for n in range(20)))
        assert client.num_in_flight == 0


async def test_a_slow_consumer_gets_everything_in_fewer_pieces(endpoint: str, client: EngineClient) -> None:
    with running_server(endpoint):
        await client.wait_ready(20)
        async with client.submit(request("r", [1], 2000)) as stream:
            first = await anext(stream)
            await until(lambda: client.num_in_flight == 0)
            tokens, outputs = await collect(stream)
        assert first.new_token_ids + tokens == continuation([1], 2000)
        assert [output.finish_reason for output in outputs] == ["length"]


async def test_leaving_a_stream_aborts_its_request(endpoint: str, client: EngineClient) -> None:
    with running_server(endpoint, step_s=0.005) as server:
        await client.wait_ready(20)
        async with client.submit(request("r", [1], 50_000)) as stream:
            await anext(stream)
            assert client.num_in_flight == 1
        assert client.num_in_flight == 0
        assert [output async for output in stream] == []
        await until(lambda: is_idle(server.engine))


async def test_a_cancelled_task_aborts_its_request(endpoint: str, client: EngineClient) -> None:
    async def consume() -> None:
        async with client.submit(request("r", [1], 50_000)) as stream:
            await collect(stream)

    with running_server(endpoint, step_s=0.005) as server:
        await client.wait_ready(20)
        task = asyncio.create_task(consume())
        await until(lambda: server.engine.stats().num_running == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: is_idle(server.engine))


async def test_refusals_name_the_field(endpoint: str, client: EngineClient) -> None:
    with running_server(endpoint, step_s=0.005):
        await client.wait_ready(20)
        async with client.submit(request("bad", [10**9])) as stream:
            with pytest.raises(RequestRefusedError) as refused:
                await anext(stream)
        assert (refused.value.error.code, refused.value.error.param) == ("invalid", "prompt_token_ids")
        assert client.num_in_flight == 0
        async with client.submit(request("r", [1], 50)) as stream:
            with pytest.raises(RequestRefusedError, match="in flight already"):
                client.submit(request("r", [2]))
            assert (await collect(stream))[0] == continuation([1], 50)


@pytest.mark.parametrize(
    ("unsendable", "param", "complaint"),
    [
        (EngineRequest("r", [1] * (17 << 20)), "prompt_token_ids", "prompt_token_ids: cannot be sent: too_large"),
        (EngineRequest("\ud800", [1]), "request_id", "request_id: cannot be sent: body"),
        (EngineRequest("r", [1], SamplingParams(seed=2**70)), "sampling_params", "sampling_params: cannot be sent"),
        (
            EngineRequest("r", [1] * (9 << 20), extra_key_spans=(ExtraKeySpan(0, 1, "k", bytes(9 << 20)),)),
            None,
            "the request cannot be sent: too_large",
        ),
    ],
)
async def test_what_the_wire_does_not_carry_is_refused_by_name(
    endpoint: str, client: EngineClient, unsendable: EngineRequest, param: str | None, complaint: str
) -> None:
    # It would never be answered.
    with running_server(endpoint):
        await client.wait_ready(20)
        with pytest.raises(RequestRefusedError, match=complaint) as refused:
            client.submit(unsendable)
        assert (refused.value.error.code, refused.value.error.param) == ("invalid", param)
        assert client.num_in_flight == 0


async def test_an_engine_that_does_not_come_is_told_of_once(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("frontend.engine_client._AWAITED_S", 0.1)
    caplog.set_level("INFO", "frontend.engine_client")
    sessions = 0

    def counted(*arguments: Any, **settings: Any) -> EngineSession:
        nonlocal sessions
        sessions += 1
        return EngineSession(*arguments, **settings)

    monkeypatch.setattr("frontend.engine_client.EngineSession", counted)
    client = EngineClient(endpoint)
    await client.start()
    await until(lambda: caplog.messages)
    tried = sessions
    await until(lambda: sessions > tried + 1)
    await client.close()
    assert caplog.messages == [f"engine_awaited endpoint={endpoint} waited_s=0"]


async def test_without_an_engine_nothing_is_accepted(client: EngineClient) -> None:
    assert client.state == "connecting"
    with pytest.raises(EngineUnavailableError, match="no engine has answered"):
        client.submit(request("r", [1]))
    with pytest.raises(EngineUnavailableError, match="no engine has answered"):
        await client.wait_ready(0.3)


async def test_a_killed_engine_ends_all_streams_and_its_successor_is_found(
    endpoint: str, client: EngineClient, engine_process: StartEngine
) -> None:
    process = engine_process()
    await client.wait_ready(20)
    streams = [client.submit(request(f"r{n}", [n + 1], 50_000)) for n in range(10)]
    for stream in streams:
        await anext(stream)
    process.kill()
    async with asyncio.timeout(20):
        ends = await asyncio.gather(*(collect(stream) for stream in streams), return_exceptions=True)
    assert [type(end) for end in ends] == [EngineUnavailableError] * 10
    assert client.state == "down" and client.num_in_flight == 0
    with pytest.raises(EngineUnavailableError):
        client.submit(request("r", [1]))
    engine_process()
    await client.wait_ready(20)
    async with client.submit(request("r0", [3], 20)) as stream:
        assert (await collect(stream))[0] == continuation([3], 20)


async def test_a_stopped_engine_says_goodbye(client: EngineClient, engine_process: StartEngine) -> None:
    process = engine_process()
    await client.wait_ready(20)
    stream = client.submit(request("r", [1], 50_000))
    await anext(stream)
    process.terminate()
    with pytest.raises(EngineUnavailableError, match="goodbye"):
        await collect(stream)
    assert await asyncio.to_thread(process.wait, 20) == 0


async def test_a_frozen_engine_is_found_by_its_heartbeat_and_taken_back(
    client: EngineClient, engine_process: StartEngine
) -> None:
    process = engine_process()
    await client.wait_ready(20)
    stream = client.submit(request("r", [1], 50_000))
    await anext(stream)
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(EngineUnavailableError, match="silent"):
        async with asyncio.timeout(20):
            await collect(stream)
    assert client.state == "down"
    # Attempts to connect to it do not make it look alive.
    await asyncio.sleep(1.5)
    assert client.state == "down"
    process.send_signal(signal.SIGCONT)
    await client.wait_ready(20)
    async with client.submit(request("r", [2], 20)) as stream:
        assert (await collect(stream))[0] == continuation([2], 20)


async def test_a_blocked_event_loop_is_not_taken_for_a_dead_engine(
    endpoint: str, client: EngineClient, engine_process: StartEngine
) -> None:
    engine_process(0.005)
    await client.wait_ready(20)
    async with client.submit(request("r", [1], 300)) as stream:
        tokens = (await anext(stream)).new_token_ids
        time.sleep(1.5)  # noqa: ASYNC251 - the point
        tokens += (await collect(stream))[0]
    assert tokens == continuation([1], 300)
    assert client.state == "ready"


async def test_closing_fails_streams_and_frees_the_engine(endpoint: str) -> None:
    with running_server(endpoint, step_s=0.005) as server:
        client = EngineClient(endpoint)
        await client.start()
        await client.wait_ready(20)
        stream = client.submit(request("r", [1], 50_000))
        await anext(stream)
        await client.close()
        with pytest.raises(EngineUnavailableError, match="closed"):
            await collect(stream)
        with pytest.raises(EngineUnavailableError, match="closed"):
            client.submit(request("r2", [1]))
        await until(lambda: is_idle(server.engine))
        await client.close()


async def test_a_killed_frontend_leaves_nothing_in_the_engine(endpoint: str, client: EngineClient) -> None:
    def run_until_killed(server: EngineCoreServer) -> None:
        with subprocess.Popen(
            [sys.executable, "-m", "tests.fake_frontend", endpoint, "5"], cwd=ROOT, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"running\n"
            assert server.engine.stats().num_running == 5
            process.kill()

    with running_server(endpoint, step_s=0.005) as server:
        await client.wait_ready(20)
        await asyncio.to_thread(run_until_killed, server)
        await until(lambda: is_idle(server.engine))
        async with client.submit(request("r0", [3], 20)) as stream:
            assert (await collect(stream))[0] == continuation([3], 20)


@pytest.fixture
async def scripted(endpoint: str) -> AsyncIterator[BareEngine]:
    context = zmq.asyncio.Context()
    yield BareEngine(context, endpoint)
    context.destroy(linger=0)


async def test_outputs_of_another_epoch_are_dropped_and_counted(client: EngineClient, scripted: BareEngine) -> None:
    async def work() -> None:
        await client.wait_ready(20)
        async with client.submit(request("r", [1])) as stream:
            await scripted.say(*encode(EngineOutputs([RequestOutput("r", [666])]), 41, 2))
            await scripted.tell(EngineOutputs([RequestOutput("unknown", [5], finish_reason="stop")]), 42)
            await scripted.tell(EngineOutputs([RequestOutput("r", [7], finish_reason="stop")]), 42)
            assert (await collect(stream))[0] == [7]
        assert client.drops.counts == {"stale_epoch": 1}

    await scripted.welcome(42)
    await keep_alive(scripted, 42, work())


async def test_tokens_before_an_error_are_handed_over_first(client: EngineClient, scripted: BareEngine) -> None:
    async def work() -> None:
        await client.wait_ready(20)
        async with client.submit(request("r", [1])) as stream:
            error = RequestError("overloaded", "too slow")
            await scripted.tell(EngineOutputs([RequestOutput("r", [1, 2])]), 1)
            await scripted.tell(EngineOutputs([RequestOutput("r", [], finish_reason="abort", error=error)]), 1)
            await until(lambda: client.num_in_flight == 0)
            assert (await anext(stream)).new_token_ids == [1, 2]
            with pytest.raises(RequestRefusedError, match="too slow"):
                await anext(stream)

    await scripted.welcome(1)
    await keep_alive(scripted, 1, work())


@pytest.mark.parametrize(
    ("reason", "frames"),
    [("header", [b"HTTP/1.1 200 OK", b""]), ("frames", [pack_header(1, 2)]), ("body", [pack_header(1, 2), b"\xc1"])],
)
async def test_an_unreadable_message_ends_the_session(
    client: EngineClient, scripted: BareEngine, reason: str, frames: list[bytes]
) -> None:
    # It may have been somebody's tokens: nobody may wait for them for ever.
    await scripted.welcome(1)
    await client.wait_ready(20)
    async with client.submit(request("r", [1])) as stream:
        await scripted.say(*frames)
        with pytest.raises(EngineUnavailableError, match=f"the engine sent what cannot be read: {reason}"):
            await collect(stream)
    assert client.drops.counts == {reason: 1}
    await scripted.welcome(2)
    await client.wait_ready(20)


@pytest.mark.parametrize("num_sessions", [60, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.timeout(1200)
async def test_any_number_of_malformed_messages_does_no_harm(endpoint: str, num_sessions: int) -> None:
    # A retry waits half a heartbeat or so: sessions follow one another quickly.
    rng = random.Random(0)
    context = zmq.asyncio.Context()
    scripted = BareEngine(context, endpoint)
    client = EngineClient(endpoint, heartbeat_interval_s=0.05, heartbeat_timeout_s=2.0)
    await client.start()
    messages = [
        Heartbeat(),
        Goodbye(),
        Welcome(CAPABILITIES, 1),
        Refused("no"),
        WantFeatures([WantedFeature("r", key_of("cat")), WantedFeature("r", key_of("horse"))]),
        EngineOutputs([RequestOutput("r", [1, 2, 3], 16, "error", error=RequestError("invalid", "bad", "seed"))]),
    ]
    num_said = 0
    for epoch in range(1, num_sessions + 1):
        await scripted.welcome(epoch)
        await client.wait_ready(20)
        stream = client.submit(pictured("r", ["cat"]), Pictures())
        ending = asyncio.create_task(collect(stream))
        while client.state == "ready" and num_said < 100 * epoch:
            good = encode(rng.choices(messages, (1, 1, 1, 1, 3, 8))[0], epoch, scripted.next_sequence)
            # The connection may have ended.
            with contextlib.suppress(zmq.ZMQError):
                await scripted.say(*mutate(good, rng))
            scripted.next_sequence += rng.random() < 0.5
            num_said += 1
            await asyncio.sleep(0)
        # Whatever came, its stream has not been forgotten.
        if client.state == "ready":
            await scripted.say(*encode(Goodbye(), epoch, UNCOUNTED))
        async with asyncio.timeout(20):
            await asyncio.gather(ending, return_exceptions=True)

    async def work() -> None:
        await client.wait_ready(20)
        async with client.submit(request("r", [1])) as stream:
            await scripted.tell(EngineOutputs([RequestOutput("r", [7], finish_reason="stop")]), 1)
            assert (await collect(stream))[0] == [7]

    drops = client.drops.counts
    assert drops["body"] > 0 and drops["header"] + drops["frames"] > 0
    await scripted.welcome(1)
    await keep_alive(scripted, 1, work())
    await client.close()
    context.destroy(linger=0)


async def test_a_message_that_never_comes_ends_the_session(client: EngineClient, scripted: BareEngine) -> None:
    await scripted.welcome(1)
    await client.wait_ready(20)
    stream = client.submit(request("r", [1]))
    await scripted.tell(EngineOutputs([RequestOutput("r", [5])]), 1)
    scripted.next_sequence += 1
    # Also if it was the last: heartbeats are counted.
    await scripted.tell(Heartbeat(), 1)
    assert (await anext(stream)).new_token_ids == [5]
    with pytest.raises(EngineUnavailableError, match="messages were lost: message 4 of the engine, expected 3"):
        await anext(stream)
    assert client.drops.counts == {"lost": 1}
    await scripted.welcome(2)
    await client.wait_ready(20)


async def test_a_message_that_comes_twice_is_taken_once(client: EngineClient, scripted: BareEngine) -> None:
    async def work() -> None:
        await client.wait_ready(20)
        async with client.submit(request("r", [1])) as stream:
            await scripted.tell(EngineOutputs([RequestOutput("r", [5])]), 1)
            scripted.next_sequence -= 1
            await scripted.tell(EngineOutputs([RequestOutput("r", [5])]), 1)
            await scripted.say(*encode(Welcome(CAPABILITIES, scripted.hello_sequence), 1, 1))
            await scripted.tell(EngineOutputs([RequestOutput("r", [7], finish_reason="stop")]), 1)
            assert (await collect(stream))[0] == [5, 7]
        assert client.drops.counts == {"duplicate": 2}

    await scripted.welcome(1)
    await keep_alive(scripted, 1, work())


async def test_an_engine_that_begins_anew_has_given_up_what_was_in_flight(
    client: EngineClient, scripted: BareEngine
) -> None:
    await scripted.welcome(1)
    await client.wait_ready(20)
    stream = client.submit(request("r", [1]))
    await scripted.tell(Welcome(CAPABILITIES, scripted.hello_sequence), 1)
    with pytest.raises(EngineUnavailableError, match="began the session anew"):
        await anext(stream)


async def test_a_client_without_file_descriptors_goes_on_trying(
    monkeypatch: pytest.MonkeyPatch, client: EngineClient, engine_process: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    process = engine_process()
    await client.wait_ready(20)
    stream = client.submit(request("r", [1], 50_000))
    made: list[zmq.Socket[bytes]] = []

    def too_many_open_files(*_: object, **__: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    def half_made_dealer(*args: Any, **options: Any) -> zmq.Socket[bytes]:
        made.append(make_dealer(*args, **options))
        made[-1].get_monitor_socket = too_many_open_files
        return made[-1]

    with monkeypatch.context() as patched:
        patched.setattr("frontend.engine_session.make_dealer", too_many_open_files)
        process.kill()
        with pytest.raises(EngineUnavailableError):
            await collect(stream)
        await until(lambda: "Too many open files" in (client.down_reason or ""))
        patched.setattr("frontend.engine_session.make_dealer", half_made_dealer)
        await until(lambda: len(made) >= 3)
        assert made[0].closed and made[1].closed
        with pytest.raises(EngineUnavailableError, match="Too many open files"):
            client.submit(request("r", [1]))
    # The log is not filled by it, either.
    assert len([record for record in caplog.records if record.exc_info]) == 1
    engine_process()
    await client.wait_ready(20)
    async with client.submit(request("r", [3], 20)) as stream:
        assert (await collect(stream))[0] == continuation([3], 20)


@pytest.mark.parametrize("version", [1, PROTOCOL_VERSION + 1])
async def test_an_engine_of_another_version_is_down_with_the_reason(
    client: EngineClient, scripted: BareEngine, version: int
) -> None:
    scripted.identity, *_ = await scripted.router.recv_multipart()
    # The first version's header ended after the epoch.
    await scripted.say(pack_header(9, 1, version=version)[: 16 if version == 1 else None], b"\xc1 of another age")
    await until(lambda: client.state == "down")
    assert client.down_reason is not None and f"protocol {version}" in client.down_reason
    assert client.drops.counts == {"version": 1}
    with pytest.raises(EngineUnavailableError, match="protocol"):
        client.submit(request("r", [1]))
    # It keeps asking: the engine may be replaced by one that fits.
    scripted.identity, *_ = await scripted.router.recv_multipart()
    await scripted.say(*encode(Refused("not today"), 9, UNCOUNTED))
    await until(lambda: client.down_reason == "the engine refused the connection: not today")
    await scripted.welcome(9)
    await client.wait_ready(20)
    assert client.state == "ready" and client.down_reason is None
