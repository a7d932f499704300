"""Frontends load and unload LoRA adapters of an engine process; everybody is told, and nobody's stream waits for it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_core import EngineConfig, EngineCore, EngineRequest, SamplingParams
from engine_core.config import LoraModule
from engine_core.lora.adapter import Adapter
from engine_core.server import EngineCoreServer
from ipc.messages import (
    AdapterAnswer,
    Adapters,
    AddRequest,
    GetStats,
    Goodbye,
    Heartbeat,
    LoadAdapter,
    Stats,
    UnloadAdapter,
)
from tests.fake_adapters import fake_digest, write_fake_adapter
from tests.fake_runner import FakeRunner, continuation
from tests.wire_peers import FAST, BareFrontend, Connect, is_idle, running_server, wait_until

CALLS = itertools.count()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for weights in ("w1", "w2"):
        write_fake_adapter(tmp_path / "root" / weights, weights)
    return tmp_path / "root"


def make_engine(root: Path | None, *, runner: FakeRunner | None = None, **settings) -> EngineCore:
    settings = {"enable_lora": True, "lora_root": None if root is None else str(root)} | settings
    return EngineCore(EngineConfig(**settings), runner or FakeRunner(num_adapter_slots=2))


class SlowToRead(FakeRunner):
    """It reads nothing until `go_on`."""

    def __init__(self, **options) -> None:
        super().__init__(num_adapter_slots=2, **options)
        self.reading, self.go_on = threading.Event(), threading.Event()

    def read_adapter(self, path: Path, root: Path | None = None) -> Adapter:
        self.reading.set()
        self.go_on.wait(30)
        return super().read_adapter(path, root)


def call(frontend: BareFrontend, make: Callable[[int], LoadAdapter | UnloadAdapter]) -> AdapterAnswer:
    call_id = next(CALLS)
    frontend.send(make(call_id))
    answer = frontend.receive(AdapterAnswer)
    assert isinstance(answer, AdapterAnswer) and answer.call_id == call_id
    assert (answer.adapter is None) != (answer.error is None)
    return answer


def load(frontend: BareFrontend, name: str, path: str, **options) -> AdapterAnswer:
    return call(frontend, lambda call_id: LoadAdapter(call_id, name, path, **options))


def unload(frontend: BareFrontend, name: str) -> AdapterAnswer:
    return call(frontend, lambda call_id: UnloadAdapter(call_id, name))


def ask(frontend: BareFrontend, request_id: str, adapter: str, max_tokens: int = 5) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    frontend.send(AddRequest(EngineRequest(request_id, [5] * 40, params, adapter=adapter)))


def test_an_adapter_is_loaded_asked_for_and_unloaded(endpoint: str, join: Connect, root: Path):
    with running_server(endpoint, engine=make_engine(root)) as server:
        frontend = join()
        info = load(frontend, "a", "w1").adapter
        assert info is not None and (info.name, info.digest) == ("a", fake_digest("w1").hex())
        for request_id, adapter, weights in (("r1", "a", "w1"), ("r2", "", None), ("r3", "a", "w1")):
            ask(frontend, request_id, adapter)
            tokens, last = frontend.finish(request_id)[request_id]
            assert tokens == continuation([5] * 40, 5, weights)
            assert last.num_cached_tokens == (39 if request_id == "r3" else 0)
        assert unload(frontend, "a").adapter == info
        ask(frontend, "r4", "a")
        _, last = frontend.finish("r4")["r4"]
        assert last.error is not None and (last.error.code, last.error.param) == ("invalid", "adapter")
        frontend.send(GetStats(1))
        answer = frontend.receive(Stats)
        assert isinstance(answer, Stats)
        stats = answer.stats
        assert (stats.num_adapters, stats.adapter_slots, stats.adapter_placements) == (0, 2, 1)
        wait_until(lambda: is_idle(server.engine) and server.engine.runner.adapters == [None, None])


def test_everybody_is_told_of_each_change_before_who_caused_it_is_answered(endpoint: str, join: Connect, root: Path):
    engine = make_engine(root, lora_modules=(LoraModule("first", str(root / "w2")),))
    with running_server(endpoint, engine=engine):
        one = join()
        other = join()
        late = join()
        for make_change, names in (
            (lambda: one.send(LoadAdapter(1, "a", "w1")), ["first", "a"]),
            (lambda: one.send(LoadAdapter(2, "b", "w1")), ["first", "a", "b"]),
            (lambda: one.send(UnloadAdapter(3, "first")), ["a", "b"]),
        ):
            make_change()
            told = one.receive()
            assert isinstance(told, Adapters) and [info.name for info in told.adapters] == names
            assert isinstance(one.receive(), AdapterAnswer)
            assert other.receive() == told
        late.send(Goodbye())
        welcome = join().hello()
        assert [info.name for info in welcome.adapters] == ["a", "b"] and welcome.capabilities.max_loras == 2


@pytest.mark.parametrize(
    ("name", "path", "reason", "param"),
    [
        ("a", "none", "path_not_found", "lora_path"),
        ("a", "../outside", "outside_lora_root", "lora_path"),
        ("a", "/", "outside_lora_root", "lora_path"),
        ("a", "link", "outside_lora_root", "lora_path"),
        ("a", "w1\0", "path_not_found", "lora_path"),
        ("a", "empty", "invalid_adapter", "lora_path"),
        (" a", "w1", "invalid_name", "lora_name"),
        ("fake", "w1", "name_taken", "lora_name"),
        ("taken", "w2", "name_taken", "lora_name"),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_the_reason_and_the_engine_serves_on(
    endpoint: str, join: Connect, root: Path, name: str, path: str, reason: str, param: str
):
    outside = write_fake_adapter(root.parent / "outside", "w")
    (root / "link").symlink_to(outside)
    (root / "empty").mkdir()
    with running_server(endpoint, engine=make_engine(root)):
        frontend = join()
        load(frontend, "taken", "w1")
        error = load(frontend, name, path).error
        assert error is not None and (error.code, error.reason, error.param) == ("invalid", reason, param)
        error = unload(frontend, "nobody").error
        assert error is not None and (error.reason, error.param) == ("unknown_adapter", "lora_name")
        ask(frontend, "r", "taken")
        assert frontend.finish("r")["r"][0] == continuation([5] * 40, 5, "w1")


def test_without_a_root_nothing_is_loaded_by_path(endpoint: str, join: Connect, root: Path):
    with running_server(endpoint, engine=make_engine(None)):
        error = load(join(), "a", str(root / "w1")).error
        assert error is not None and (error.code, error.reason) == ("invalid", "outside_lora_root")


def test_without_enable_lora_calls_are_refused(endpoint: str, join: Connect):
    with running_server(endpoint):
        frontend = join()
        for answer in (load(frontend, "a", "w1"), unload(frontend, "a")):
            assert answer.error is not None and answer.error.reason == "lora_disabled"


def test_what_breaks_while_reading_is_internal_and_the_next_call_works(endpoint: str, join: Connect, root: Path):
    class Breaks(FakeRunner):
        def read_adapter(self, path: Path, root: Path | None = None) -> Adapter:
            if path.name == "w2":
                raise ZeroDivisionError("by nothing")
            return super().read_adapter(path, root)

    with running_server(endpoint, engine=make_engine(root, runner=Breaks(num_adapter_slots=2))):
        frontend = join()
        error = load(frontend, "a", "w2").error
        assert error is not None and (error.code, error.message) == ("internal", "ZeroDivisionError: by nothing")
        assert load(frontend, "a", "w1").adapter is not None


def test_weights_of_another_digest_are_refused(endpoint: str, join: Connect, root: Path):
    with running_server(endpoint, engine=make_engine(root)):
        frontend = join()
        error = load(frontend, "a", "w1", digest=fake_digest("w2").hex()).error
        assert error is not None and error.reason == "other_weights"
        assert load(frontend, "a", "w1", digest=fake_digest("w1").hex()).adapter is not None
        assert load(frontend, "a", "w2", replaces=True).adapter is not None


def test_while_an_adapter_is_read_streams_run_and_heartbeats_come(endpoint: str, join: Connect, root: Path):
    runner = SlowToRead()
    with running_server(endpoint, engine=make_engine(root, runner=runner)):
        frontend, other = join(), join()
        frontend.send(LoadAdapter(1, "a", "w1"))
        assert runner.reading.wait(20)
        for asking in (frontend, other):
            ask(asking, "r", "")
            assert asking.finish("r")["r"][0] == continuation([5] * 40, 5)
            assert isinstance(asking.receive(Heartbeat), Heartbeat)
        runner.go_on.set()
        answer = frontend.receive(AdapterAnswer)
        assert isinstance(answer, AdapterAnswer) and answer.adapter is not None


def test_while_an_adapter_is_read_others_are_unloaded_and_its_own_name_keeps_its_order(
    endpoint: str, join: Connect, root: Path
):
    runner = SlowToRead()
    engine = make_engine(root, runner=runner)
    runner.go_on.set()
    engine.load_adapter("there", root / "w2")
    runner.reading.clear()
    runner.go_on.clear()
    with running_server(endpoint, engine=engine):
        frontend = join()
        frontend.send(LoadAdapter(1, "a", "w1"))
        assert runner.reading.wait(20)
        frontend.send(UnloadAdapter(2, "a"))
        for call_id, reason in ((3, None), (4, "unknown_adapter")):
            frontend.send(UnloadAdapter(call_id, "there"))
            answer = frontend.receive(AdapterAnswer)
            assert isinstance(answer, AdapterAnswer) and answer.call_id == call_id
            assert (answer.error and answer.error.reason) == reason
        runner.go_on.set()
        for call_id in (1, 2):
            answer = frontend.receive(AdapterAnswer)
            assert isinstance(answer, AdapterAnswer)
            assert (answer.call_id, answer.error) == (call_id, None)
        # Nothing is remembered of it.
        assert unload(frontend, "a").error is not None
        assert load(frontend, "a", "w1").adapter is not None


def test_more_calls_than_may_wait_are_refused_as_overloaded(endpoint: str, join: Connect, root: Path):
    runner = SlowToRead()
    with running_server(endpoint, engine=make_engine(root, runner=runner, max_cpu_loras=1000)):
        frontend = join()
        frontend.send(LoadAdapter(0, "a0", "w1"))
        # From now on it waits no longer.
        assert runner.reading.wait(20)
        for call_id in range(1, 300):
            frontend.send(LoadAdapter(call_id, f"a{call_id}", "w1"))
        answer = frontend.receive(AdapterAnswer)
        assert isinstance(answer, AdapterAnswer)
        assert answer.error is not None and answer.error.code == "overloaded" and answer.call_id > 200
        runner.go_on.set()
        loaded = 0
        while loaded < 257:
            answer = frontend.receive(AdapterAnswer)
            assert isinstance(answer, AdapterAnswer)
            loaded += answer.adapter is not None


def test_a_load_counts_although_its_frontend_is_gone(endpoint: str, join: Connect, root: Path):
    runner = SlowToRead()
    with running_server(endpoint, engine=make_engine(root, runner=runner)) as server:
        frontend, other = join(), join()
        frontend.send(LoadAdapter(1, "a", "w1"))
        assert runner.reading.wait(20)
        frontend.send(Goodbye())
        wait_until(lambda: len(list(server.link._sessions)) == 1)
        runner.go_on.set()
        told = other.receive(Adapters)
        assert isinstance(told, Adapters) and [info.name for info in told.adapters] == ["a"]


def test_an_engine_that_stops_does_not_wait_for_ever_for_an_adapter(
    endpoint: str, join: Connect, root: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("engine_core.adapter_calls._STOP_TIMEOUT_S", 0.2)
    runner = SlowToRead()
    server = EngineCoreServer(make_engine(root, runner=runner), endpoint, FAST)
    thread = threading.Thread(target=server.run)
    thread.start()
    frontend = join()
    for call_id in range(3):
        frontend.send(LoadAdapter(call_id, f"a{call_id}", "w1"))
    assert runner.reading.wait(20)
    server.stop()
    thread.join(20)
    assert not thread.is_alive()
    assert isinstance(frontend.receive(Goodbye), Goodbye)
    runner.go_on.set()
    server._adapter_calls._thread.join(20)
    assert not server._adapter_calls._thread.is_alive()
    assert len(server.engine.adapters()) == 1, "no further one is begun"
