"""An engine behind a socket serves several frontends, and outlives whatever they do."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

import msgspec
import pytest

from engine_core.config import EngineConfig
from engine_core.engine import EngineCore
from engine_core.frontend_link import LinkSettings
from engine_core.request import Request
from engine_core.runner import ScheduledRequest
from engine_core.server import EngineCoreServer
from ipc.codec import DEFAULT_LIMITS, PROTOCOL_VERSION, encode, pack_header
from ipc.messages import (
    AbortRequests,
    AddRequest,
    EngineOutputs,
    Goodbye,
    Heartbeat,
    Hello,
    Refused,
    SupplyFeature,
    Welcome,
)
from ipc.vocabulary import EngineRequest, ExtraKeySpan, SamplingParams
from tests.fake_runner import FakeRunner, continuation
from tests.mutations import mutate
from tests.pictures_in_prompts import inputs_of, key_of, picture_engine, pictured
from tests.wire_peers import FAST, Connect, is_idle, running_server, wait_until

# Sessions that end do so for another reason than silence.
PATIENT = LinkSettings(heartbeat_interval_s=0.1, frontend_timeout_s=300.0)


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


@pytest.mark.parametrize("version", [1, PROTOCOL_VERSION + 1])
def test_another_protocol_version_is_refused_with_the_reason(endpoint: str, connect: Connect, version: int) -> None:
    with running_server(endpoint):
        stranger = connect()
        # The first version's header ended after the epoch.
        stranger.socket.send_multipart([pack_header(0, 0, version=version)[: 16 if version == 1 else None], b"\xc1"])
        refused = stranger.receive()
        assert isinstance(refused, Refused)
        assert refused.reason == f"the engine speaks protocol {PROTOCOL_VERSION}, the frontend {version}"
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
        while silent.receive(Goodbye, timeout_s=0.05) is None:
            alive.send(Heartbeat())
        wait_until(lambda: server.engine.stats().num_running == 1)
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
    # What the quick one wants fits its backlog, however late its reading thread gets its turn.
    settings = LinkSettings(heartbeat_interval_s=0.1, queue_messages=4, max_backlog_messages=600, max_merged_tokens=0)
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
        slow.send(Heartbeat(), epoch=1)  # once this was dropped, what came before it was taken
        wait_until(lambda: server.link.drops.counts["stale_epoch"] == 1)
        results = slow.finish(*prompts, "one more")
        for request_id, (tokens, last) in results.items():
            assert last.error is not None and last.error.code == "overloaded"
            if request_id != "one more":
                assert last.finish_reason == "abort"
                assert 600 < len(tokens) < 60_000
                assert tokens == continuation(prompts[request_id], len(tokens))
        # Having read everything, it is as good as any other.
        slow.add("again", [3], 5)
        assert slow.finish("again")["again"][0] == continuation([3], 5)


def test_a_frontend_that_reads_late_keeps_up_in_larger_messages(endpoint: str, connect: Connect) -> None:
    settings = LinkSettings(heartbeat_interval_s=0.1, queue_messages=4, max_backlog_messages=600)
    with running_server(endpoint, settings=settings) as server:
        slow = connect(queue_messages=4)
        slow.hello()
        for n in range(10):
            slow.add(f"r{n}", [n + 1], 4_000)
        wait_until(lambda: server.engine.stats().generated_tokens == 40_000, timeout_s=120)
        wait_until(lambda: is_idle(server.engine))
        slow.add("late", [99], 5)
        results = slow.finish(*(f"r{n}" for n in range(10)), "late")
        assert all(last.error is None for _, last in results.values())
        for n in range(10):
            assert results[f"r{n}"][0] == continuation([n + 1], 4_000)
        assert results["late"][0] == continuation([99], 5)


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


@pytest.mark.parametrize("num_messages", [4000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.timeout(1200)
def test_any_number_of_malformed_messages_does_no_harm(
    endpoint: str, connect: Connect, known: bool, num_messages: int
) -> None:
    rng = random.Random(0)
    params = SamplingParams(max_tokens=2)
    messages = [
        Hello(),
        Heartbeat(),
        Goodbye(),
        AbortRequests(["r", "s"]),
        AddRequest(EngineRequest("r", [1, 2, 3], params, (ExtraKeySpan(0, None, "kind", "key"),), 1, 2.5)),
        AddRequest(pictured("s", ["cat", "dog"], 2)),
        SupplyFeature("s", key_of("cat"), inputs_of(key_of("cat"))),
        SupplyFeature("s", key_of("dog"), inputs_of(key_of("dog"))),
    ]
    with running_server(endpoint, engine=picture_engine(step_s=0.002)) as server:
        hostile, frontend = connect(), connect()
        frontend.hello()
        frontend.add("meanwhile", [9], 1000)
        for n in range(num_messages):
            if n % 100 == 0:
                frontend.send(Heartbeat())
                while hostile.receive(object, timeout_s=0.001) is not None:
                    pass
            if known and n % 5 == 0:
                # Most malformed messages end its session.
                hostile.send(Hello())
            hostile.next_sequence += 1
            good = encode(rng.choices(messages, (1, 1, 1, 2, 5, 2, 2, 2))[0], server.link.epoch, hostile.next_sequence)
            hostile.socket.send_multipart(mutate(good, rng))
        deep = b"\x92\xa5hello" + b"\x91" * 100_000
        hostile.socket.send_multipart([pack_header(0, 1), deep])
        hello = msgspec.msgpack.encode(["hello"])
        hostile.socket.send_multipart([pack_header(0, 1, num_frames=2002), hello, *[b""] * 2000])
        frontend.add("r", [1, 2, 3], 50)
        results = frontend.finish("meanwhile", "r")
        assert results["meanwhile"][0] == continuation([9], 1000)
        assert results["r"][0] == continuation([1, 2, 3], 50)
        drops = server.link.drops.counts
        wait_until(lambda: drops["frames"] > num_messages / 50)
        assert drops["body"] > num_messages / 10 and drops["header"] > num_messages / 50
        assert drops["version"] > 0 and drops["stale_epoch"] > 0
        assert drops["lost"] + drops["duplicate"] > 0 if known else drops["no_session"] > 0
        hostile.socket.close(linger=0)
        wait_until(lambda: is_idle(server.engine))


@pytest.mark.parametrize(
    ("reason", "frames"),
    [
        ("header", [b"GET / HTTP/1.1", b""]),
        ("frames", [pack_header(1, 2)]),
        ("body", [pack_header(1, 2), b"\xc1"]),
        ("version", [pack_header(1, 2, version=PROTOCOL_VERSION + 1), b""]),
    ],
)
def test_an_unreadable_message_ends_its_senders_session_and_no_other(
    endpoint: str, connect: Connect, reason: str, frames: list[bytes]
) -> None:
    with running_server(endpoint, step_s=0.002, settings=PATIENT) as server:
        garbled, healthy, stranger = connect(), connect(), connect()
        for frontend, token in ((garbled, 1), (healthy, 2)):
            frontend.hello()
            frontend.add("r", [token], 50_000 if frontend is garbled else 300)
        next(garbled.outputs())
        garbled.socket.send_multipart(frames)
        stranger.socket.send_multipart(frames)
        assert isinstance(garbled.receive(Goodbye), Goodbye)
        assert healthy.finish("r")["r"][0] == continuation([2], 300)
        wait_until(lambda: is_idle(server.engine))
        assert server.link.drops.counts == {reason: 2}
        assert stranger.receive(Goodbye, timeout_s=0.2) is None
        garbled.hello()
        garbled.add("r", [3], 5)
        assert garbled.finish("r")["r"][0] == continuation([3], 5)


@pytest.mark.parametrize("own_id", ["x" * 257, "é" * 129, "\x01" * (4 << 20)], ids=["ascii", "two-byte", "4 MiB"])
def test_a_request_id_too_long_is_refused_and_not_repeated(endpoint: str, connect: Connect, own_id: str) -> None:
    with running_server(endpoint):
        frontend = connect()
        frontend.hello()
        frontend.add(own_id, [1])
        (refusal,) = (last for _, last in frontend.finish(own_id).values())
        assert refusal.error is not None and refusal.error.param == "request_id"
        assert refusal.error.message == f"request_id: has {len(own_id.encode())} bytes, at most 256 are allowed"
        longest = "é" * 128
        frontend.add(longest, [1], 5)
        assert frontend.finish(longest)[longest][0] == continuation([1], 5)


def test_a_refusal_that_fits_no_message_ends_only_that_session(endpoint: str, connect: Connect) -> None:
    with running_server(endpoint, step_s=0.002, settings=PATIENT) as server:
        absurd, healthy = connect(), connect()
        for frontend in (absurd, healthy):
            frontend.hello()
            frontend.add("r", [7], 300 if frontend is healthy else 50_000)
        absurd.add("x" * (DEFAULT_LIMITS.max_body_bytes - 90), [1])
        assert isinstance(absurd.receive(Goodbye), Goodbye)
        assert healthy.finish("r")["r"][0] == continuation([7], 300)
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


def test_stopping_says_goodbye_also_when_others_have_gone_without_a_word(endpoint: str, connect: Connect) -> None:
    # No heartbeat finds out before.
    with running_server(endpoint, settings=LinkSettings(heartbeat_interval_s=300)) as server:
        frontends = [connect() for _ in range(4)]
        for frontend in frontends:
            frontend.hello()
        *gone, last = frontends
        for frontend in gone:
            frontend.socket.close(linger=0)
        time.sleep(0.2)
        server.stop()
        assert isinstance(last.receive(), Goodbye)


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


class FailingRunner(FakeRunner):
    """Some of its steps fail, counted from 1."""

    def __init__(self, *failing_steps: int) -> None:
        super().__init__()
        self._failing_steps = failing_steps
        self._num_steps = 0

    def execute(self, batch: Sequence[ScheduledRequest]) -> list[int | None]:
        self._num_steps += 1
        if self._num_steps in self._failing_steps:
            raise RuntimeError("an illegal memory access was encountered")
        return super().execute(batch)


def test_a_model_that_fails_three_steps_in_a_row_ends_the_process(endpoint: str, connect: Connect) -> None:
    engine = EngineCore(EngineConfig(), FailingRunner(1, 2, 4, 5, 6))
    server = EngineCoreServer(engine, endpoint, FAST)
    exit_codes: list[int] = []
    thread = threading.Thread(target=lambda: exit_codes.append(server.run()))
    thread.start()
    frontend = connect()
    frontend.hello()
    for step in range(1, 7):
        frontend.add("r", [step], 1)
        (_, last) = frontend.finish("r")["r"]
        if step == 3:
            assert last.finish_reason == "length"
        else:
            assert last.error is not None and last.error.code == "internal"
    assert isinstance(frontend.receive(), Goodbye)
    thread.join(20)
    assert exit_codes == [1]


class SlowToCheck(EngineCore):
    """Each request takes its time before it is queued, as a long prompt does."""

    num_checked = 0

    def prepare_request(self, request: EngineRequest) -> Request:
        if request.request_id.endswith("flood"):
            time.sleep(0.02)
            self.num_checked += 1
        return super().prepare_request(request)


@pytest.mark.parametrize("kind", [Heartbeat, EngineOutputs])
def test_a_flood_of_requests_does_not_silence_the_engine_for_others(
    endpoint: str, connect: Connect, kind: type[Heartbeat | EngineOutputs]
) -> None:
    engine = SlowToCheck(EngineConfig(), FakeRunner(step_s=0.01))
    with running_server(endpoint, engine=engine):
        flooding, listening = connect(), connect()
        flooding.hello()
        listening.hello()
        if kind is EngineOutputs:
            listening.add("r", [1], 50_000)
        assert listening.receive(kind) is not None
        started_s = heard_s = time.monotonic()
        longest_silence_s = 0.0
        for n in range(100):
            # Refused, so that none of it makes the engine step.
            flooding.add(f"{n} flood", [])
        while engine.num_checked < 100:
            heard = listening.receive(kind, timeout_s=0.5)
            now_s = time.monotonic()
            longest_silence_s = max(longest_silence_s, now_s - heard_s)
            if heard is not None:
                heard_s = now_s
        assert longest_silence_s < 0.4 * (time.monotonic() - started_s)


def test_a_frontend_that_starts_anew_gets_nothing_of_its_past(endpoint: str, connect: Connect) -> None:
    settings = LinkSettings(heartbeat_interval_s=0.1, queue_messages=4, max_backlog_messages=100_000)
    with running_server(endpoint, settings=settings) as server:
        frontend = connect(queue_messages=4)
        frontend.hello()
        frontend.add("r", [1], 3000)
        wait_until(lambda: server.engine.stats().generated_tokens == 3000)
        wait_until(lambda: is_idle(server.engine))
        for _ in range(3):
            frontend.send(Hello())
        frontend.add("r", [500], 3)
        assert isinstance(frontend.receive(Welcome), Welcome)
        assert frontend.finish("r")["r"][0] == continuation([500], 3)


@pytest.mark.parametrize("kind", ["request", "last"])
def test_a_message_that_never_comes_ends_its_senders_session_and_no_other(
    endpoint: str, connect: Connect, kind: str
) -> None:
    with running_server(endpoint, step_s=0.002, settings=PATIENT) as server:
        loses, healthy = connect(), connect()
        for frontend, token in ((loses, 1), (healthy, 2)):
            frontend.hello()
            frontend.add("r", [token], 50_000 if frontend is loses else 300)
        loses.next_sequence += 1
        if kind == "request":
            loses.add("after it", [1])
        else:
            loses.send(Heartbeat())
        assert isinstance(loses.receive(Goodbye), Goodbye)
        assert healthy.finish("r")["r"][0] == continuation([2], 300)
        wait_until(lambda: is_idle(server.engine))
        assert server.link.drops.counts == {"lost": 1}
        loses.hello()
        loses.add("r", [3], 5)
        assert loses.finish("r")["r"][0] == continuation([3], 5)


def test_a_message_that_comes_twice_is_taken_once(endpoint: str, connect: Connect) -> None:
    with running_server(endpoint, step_s=0.002) as server:
        frontend = connect()
        frontend.hello()
        frontend.add("r", [1], 50)
        frontend.next_sequence -= 1
        frontend.add("r", [1], 50)
        # A greeting begins the session anew, but not when it is the old one.
        frontend.socket.send_multipart(encode(Hello(), 0, 1))
        assert frontend.finish("r")["r"][0] == continuation([1], 50)
        assert server.link.drops.counts == {"duplicate": 2}
        frontend.next_sequence -= 1
        frontend.send(AbortRequests(["s"]))
        frontend.add("s", [2], 50)
        assert frontend.finish("s")["s"][0] == continuation([2], 50)


def test_what_does_not_fit_the_socket_has_the_number_it_is_sent_with(endpoint: str, connect: Connect) -> None:
    # `BareFrontend` checks every number.
    settings = LinkSettings(heartbeat_interval_s=0.02, frontend_timeout_s=300, queue_messages=4)
    with running_server(endpoint, settings=settings) as server:
        slow = connect(queue_messages=4)
        slow.hello()
        slow.add("r", [1], 900)
        wait_until(lambda: is_idle(server.engine) and server.engine.stats().generated_tokens == 900)
        time.sleep(0.2)
        assert slow.finish("r")["r"][0] == continuation([1], 900)
        slow.add("s", [1], 100)
        assert slow.finish("s")["s"][0] == continuation([1], 100)


def test_a_hello_is_a_sign_of_life(endpoint: str, connect: Connect) -> None:
    settings = LinkSettings(heartbeat_interval_s=0.1, frontend_timeout_s=1.0)
    with running_server(endpoint, settings=settings):
        frontend = connect()
        frontend.hello()
        for _ in range(20):
            frontend.send(Hello())
            assert isinstance(frontend.receive(), Welcome)
            time.sleep(0.1)


def num_unfinished(engine: EngineCore) -> int:
    stats = engine.stats()
    return stats.num_running + stats.num_waiting


def test_any_number_of_requests_can_be_given_up_at_once(endpoint: str, connect: Connect) -> None:
    settings = LinkSettings(heartbeat_interval_s=0.1, queue_messages=4, max_backlog_messages=20, max_merged_tokens=0)
    # Steps are so long that it does not fall behind before it has asked for everything.
    with running_server(endpoint, step_s=0.3, settings=settings) as server:
        slow = connect(queue_messages=3000)
        slow.hello()
        own_ids = [f"{n:0256}" for n in range(2500)]
        for own_id in own_ids:
            slow.add(own_id, [1], 60_000)
        wait_until(lambda: num_unfinished(server.engine) == len(own_ids))
        server.engine.runner.step_s = 0.0  # type: ignore[attr-defined]
        wait_until(lambda: is_idle(server.engine))
        given_up: list[str] = []
        while len(given_up) < len(own_ids):
            message = slow.receive(EngineOutputs)
            assert isinstance(message, EngineOutputs)
            assert len(message.outputs) <= 1024
            given_up += [output.request_id for output in message.outputs if output.finish_reason == "abort"]
        assert given_up == own_ids


def test_an_idle_engine_sleeps(endpoint: str, connect: Connect) -> None:
    with running_server(endpoint):
        frontend = connect()
        assert isinstance(frontend.hello(), Welcome)
        cpu_s, wall_s = time.process_time(), time.monotonic()
        time.sleep(1.0)
        assert time.process_time() - cpu_s < 0.3 * (time.monotonic() - wall_s)
