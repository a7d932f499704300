"""One of several continuations ends: the others run on, nothing is leaked, whenever it happens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from engine_core import EngineCore
from engine_core.server import EngineCoreServer
from ipc.messages import AbortRequests, AddRequest
from ipc.vocabulary import EngineRequest, SamplingParams
from tests.checking_runner import expected_output
from tests.engine_core.test_engine import VOCAB, B, assert_idle, make_engine, make_request, run, tokens_of
from tests.fake_runner import continuation
from tests.wire_peers import BareFrontend, is_idle, private_endpoint, running_server, wait_until

PROMPT = range(2 * B + 1)


def step_until_forked(engine: EngineCore) -> None:
    while not engine.step().outputs:
        pass


@pytest.mark.parametrize("num_steps", [0, 1, 5])
@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("max_num_seqs", [1, 8])
def test_the_others_run_on(num_steps: int, index: int, caching: bool, max_num_seqs: int) -> None:
    """Among the cases: the first one ends while others still wait for the blocks it computed."""
    engine = make_engine(enable_prefix_caching=caching, max_num_seqs=max_num_seqs)
    request = make_request(PROMPT, 9, sampling={"n": 3})
    engine.add_request(request)
    step_until_forked(engine)
    for _ in range(num_steps):
        engine.step()
    free_before = engine.stats().num_free_blocks
    engine.abort_continuations([(request.request_id, index)])
    stats = engine.stats()
    assert (stats.num_running + stats.num_waiting, stats.num_free_blocks >= free_before) == (2, True)
    outputs = run(engine)[request.request_id]
    assert {output.index for output in outputs} == {0, 1, 2} - {index}
    for output in outputs:
        if output.finish_reason is not None:
            whole = expected_output(PROMPT, 9, VOCAB)
            own = tokens_of([other for other in outputs if other.index == output.index])
            assert whole[-len(own) :] == own
    assert [output.num_unfinished for output in outputs if output.finish_reason] == [1, 0]


def test_the_last_one_aborted_ends_the_request() -> None:
    engine = make_engine()
    request = make_request(PROMPT, 9, sampling={"n": 2})
    engine.add_request(request)
    step_until_forked(engine)
    engine.abort_continuations([(request.request_id, 1), (request.request_id, 0)])
    assert_idle(engine)
    assert engine.abort_requests([request.request_id]) == []
    engine.add_request(request)
    run(engine)


def test_one_that_nothing_has_come_of_cannot_be_aborted_before_the_prompt_is_computed() -> None:
    engine = make_engine()
    request = make_request(PROMPT, 2, sampling={"n": 2})
    engine.add_request(request)
    engine.abort_continuations([(request.request_id, 0), (request.request_id, 1)])
    outputs = run(engine)[request.request_id]
    assert {output.index for output in outputs} == {0, 1}


def test_what_is_unknown_or_over_is_ignored() -> None:
    engine = make_engine()
    one, other = make_request(PROMPT, 9, sampling={"n": 2}), make_request(range(3), 9)
    for request in (one, other):
        engine.add_request(request)
    step_until_forked(engine)
    engine.abort_continuations([(one.request_id, 2), (one.request_id, -1), ("r", 0)])
    engine.abort_continuations([(one.request_id, 1)] * 2)
    outputs = run(engine)
    assert len(tokens_of(outputs[other.request_id])) == 8


def test_preempted_ones_can_be_aborted() -> None:
    engine = make_engine(6)
    request = make_request(range(9), 14, sampling={"n": 4})
    engine.add_request(request)
    while not engine.stats().preemptions:
        engine.step()
    (index,) = {preempted.index for preempted in engine._scheduler.waiting if preempted.num_preemptions}
    engine.abort_continuations([(request.request_id, index)])
    outputs = run(engine)[request.request_id]
    assert index not in {output.index for output in outputs}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EngineCoreServer]:
    with running_server(private_endpoint(tmp_path), step_s=0.005) as server:
        yield server


@pytest.fixture
def frontend(server: EngineCoreServer, tmp_path: Path) -> Iterator[BareFrontend]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    frontend = BareFrontend(context, private_endpoint(tmp_path))
    frontend.hello()
    yield frontend
    context.destroy(linger=0)


def test_over_the_wire(server: EngineCoreServer, frontend: BareFrontend) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, n=3)
    frontend.send(AddRequest(EngineRequest("r", [1, 2], params)))
    outputs = frontend.outputs()
    while next(outputs).index != 2:
        pass
    frontend.send(AbortRequests([], [("r", 0), ("unknown", 1), ("r", 77)]))
    num_tokens = {0: 0, 1: 0, 2: 0}
    for output in outputs:
        num_tokens[output.index] += len(output.new_token_ids)
        if output.ends_request:
            break
    assert num_tokens[0] < num_tokens[1]
    # An abort of what is over changes nothing, and the id is free.
    frontend.send(AbortRequests(["r"], [("r", 1)]))
    frontend.add("r", [3], 3)
    assert frontend.finish("r")["r"][0] == continuation([3], 3)
    wait_until(lambda: is_idle(server.engine))


def test_a_whole_abort_frees_the_id_of_a_request_whose_continuations_were_all_aborted(
    server: EngineCoreServer, frontend: BareFrontend
) -> None:
    for _ in range(3):
        params = SamplingParams(temperature=0, max_tokens=50_000, n=2)
        frontend.send(AddRequest(EngineRequest("r", [1, 2], params)))
        wait_until(lambda: len(server.engine._scheduler.requests) == 2)
        frontend.send(AbortRequests([], [("r", 0), ("r", 1)]))
        wait_until(lambda: is_idle(server.engine))
        frontend.send(AbortRequests(["r"]))
    wait_until(lambda: not server.link._requests)
