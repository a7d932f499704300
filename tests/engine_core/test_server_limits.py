"""An engine behind a socket that has too much to do, or is about to stop, says so, and what runs goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from engine_core.config import EngineConfig
from engine_core.engine import EngineCore
from engine_core.server import EngineCoreServer
from ipc.messages import EngineOutputs, Goodbye, Heartbeat
from ipc.vocabulary import RequestError
from tests.fake_runner import FakeRunner, continuation
from tests.wire_peers import FAST, BareFrontend, Connect, is_idle, running_server, wait_until


def error_of(frontend: BareFrontend, request_id: str) -> RequestError:
    output = next(output for output in frontend.outputs() if output.request_id == request_id)
    assert output.finish_reason == "error" and output.error is not None
    return output.error


def heartbeat(frontend: BareFrontend, wanted: Heartbeat) -> None:
    while frontend.receive(Heartbeat) != wanted:
        pass


def test_frontends_share_the_queue_and_the_refused_are_told_why(endpoint: str, join: Connect) -> None:
    engine = EngineCore(EngineConfig(max_num_seqs=1, max_num_queued_requests=1), FakeRunner(step_s=0.01))
    with running_server(endpoint, engine=engine):
        first, second = join(), join()
        first.add("runs", [1], 50)
        first.add("waits", [2], 5)
        wait_until(lambda: engine.stats().num_running == engine.stats().num_waiting == 1)
        second.add("refused", [3], 5)
        error = error_of(second, "refused")
        assert (error.code, error.reason, error.param) == ("overloaded", "max_num_queued_reqs", None)
        assert error.retry_after_s is not None and error.retry_after_s >= 1
        # Its id is free again, and there is room after a while.
        assert first.finish("runs", "waits")["waits"][0] == continuation([2], 5)
        second.add("refused", [3], 5)
        assert second.finish("refused")["refused"][0] == continuation([3], 5)
        wait_until(lambda: is_idle(engine))


def test_frontends_hear_how_much_there_is_of_others(endpoint: str, join: Connect) -> None:
    with running_server(endpoint, step_s=0.01):
        first, second = join(), join()
        for n in range(3):
            first.add(f"r{n}", [n + 1], 60_000)
        heartbeat(second, Heartbeat(3))
        heartbeat(first, Heartbeat(0))
        second.add("own", [9], 60_000)
        heartbeat(first, Heartbeat(1))
        first.send(Goodbye())
        heartbeat(second, Heartbeat(0))
        # Who comes later hears it at once.
        third = join()
        assert third.receive(Heartbeat) == Heartbeat(1)


class Draining:
    """A server in a thread that is told to drain, and the exit code it ends with."""

    def __init__(self, endpoint: str, *, step_s: float = 0.01) -> None:
        self.engine = EngineCore(EngineConfig(), FakeRunner(step_s=step_s))
        self.server = EngineCoreServer(self.engine, endpoint, FAST)
        self.exit_code: int | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        self.exit_code = self.server.run()


@pytest.fixture
def draining(endpoint: str) -> Iterator[Draining]:
    draining = Draining(endpoint)
    yield draining
    draining.server.stop()
    draining.thread.join()


def test_what_runs_and_what_waits_is_finished_before_the_engine_ends(draining: Draining, join: Connect) -> None:
    frontend = join()
    for n in range(100):  # more than have seats
        frontend.add(f"r{n}", [n + 1], 40)
    frontend.receive(EngineOutputs)
    draining.server.drain(60)
    heartbeat(frontend, Heartbeat(0, is_draining=True))
    finished = frontend.finish(*(f"r{n}" for n in range(100)))
    assert {last.finish_reason for _, last in finished.values()} == {"length"}
    assert isinstance(frontend.receive(Goodbye), Goodbye)
    draining.thread.join(20)
    assert draining.exit_code == 0
    assert is_idle(draining.engine)
    assert draining.engine.stats().generated_tokens == 100 * 40


def test_new_requests_are_refused_also_from_newcomers(draining: Draining, join: Connect) -> None:
    frontend = join()
    frontend.add("runs", [1], 200)
    frontend.receive(EngineOutputs)
    draining.server.drain(60)
    frontend.add("late", [2], 5)
    error = error_of(frontend, "late")
    assert (error.code, error.reason) == ("overloaded", "draining")
    newcomer = join()
    assert newcomer.receive(Heartbeat) == Heartbeat(1, is_draining=True)
    newcomer.add("late", [2], 5)
    assert error_of(newcomer, "late").reason == "draining"
    frontend.finish("runs")
    draining.thread.join(20)
    assert draining.exit_code == 0


def test_an_idle_engine_ends_at_once(draining: Draining, join: Connect) -> None:
    frontend = join()
    draining.server.drain(3600)
    assert isinstance(frontend.receive(Goodbye), Goodbye)
    draining.thread.join(20)
    assert draining.exit_code == 0


def test_patience_has_an_end(draining: Draining, join: Connect) -> None:
    frontend = join()
    frontend.add("endless", [1], 60_000)
    frontend.receive(EngineOutputs)
    draining.server.drain(0.2)
    assert isinstance(frontend.receive(Goodbye), Goodbye)
    draining.thread.join(20)
    assert draining.exit_code == 0


def test_a_stop_goes_before_a_drain(draining: Draining, join: Connect) -> None:
    frontend = join()
    frontend.add("endless", [1], 60_000)
    frontend.receive(EngineOutputs)
    draining.server.drain(3600)
    draining.server.stop()
    assert isinstance(frontend.receive(Goodbye), Goodbye)
    draining.thread.join(20)
    assert draining.exit_code == 0


def test_a_signal_that_comes_when_all_is_over_does_nothing(draining: Draining) -> None:
    draining.server.stop()
    draining.thread.join(20)
    draining.server.drain(60)
    draining.server.stop()
    assert draining.exit_code == 0
