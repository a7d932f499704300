"""An engine behind a socket asks for the pictures it needs, takes each once, and frees everything whoever goes away."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pytest
import zmq

from engine_core import feature_inputs
from engine_core.engine import EngineCore
from ipc.messages import AbortRequests, AddRequest, EngineOutputs, Goodbye, Hello, SupplyFeature, WantFeatures
from ipc.vocabulary import RequestError, WantedFeature
from tests.fake_runner import continuation
from tests.pictures_in_prompts import inputs_of, key_of, picture_engine, pictured
from tests.wire_peers import FAST, BareFrontend, Connect, is_idle, running_server, wait_until

CAT, DOG = key_of("cat"), key_of("dog")


def ask(frontend: BareFrontend, request_id: str, *names: str, max_tokens: int = 5, input_bytes: int = 4096) -> None:
    frontend.send(AddRequest(pictured(request_id, names, max_tokens, input_bytes=input_bytes)))


def wanted(frontend: BareFrontend, count: int = 1) -> list[WantedFeature]:
    """The next features that are wanted, in however many messages."""
    features: list[WantedFeature] = []
    while len(features) < count:
        message = frontend.receive(WantFeatures)
        assert isinstance(message, WantFeatures), "nothing was wanted"
        features += message.features
    return features


def supply(frontend: BareFrontend, request_id: str, *keys: bytes, input_bytes: int = 4096) -> None:
    for key in keys:
        frontend.send(SupplyFeature(request_id, key, inputs_of(key, input_bytes)))


def told(request_id: str, names: Iterable[str], max_tokens: int = 5) -> list[int]:
    return continuation(pictured(request_id, list(names)).prompt_token_ids, max_tokens)


def test_a_request_is_computed_when_its_pictures_have_come(endpoint: str, join: Connect) -> None:
    with running_server(endpoint, engine=picture_engine()) as server:
        frontend = join()
        ask(frontend, "r", "cat", "dog")
        assert wanted(frontend, 2) == [WantedFeature("r", CAT), WantedFeature("r", DOG)]
        supply(frontend, "r", DOG)
        assert frontend.receive(EngineOutputs, timeout_s=0.2) is None
        supply(frontend, "r", CAT)
        assert frontend.finish("r")["r"][0] == told("r", ["cat", "dog"])
        wait_until(lambda: is_idle(server.engine))
        assert not server.link.drops.counts


def test_frontends_are_asked_for_their_own_pictures(endpoint: str, join: Connect) -> None:
    with running_server(endpoint, engine=picture_engine()):
        first, second = join(), join()
        ask(first, "same", "cat")
        ask(second, "same", "dog")
        assert wanted(first) == [WantedFeature("same", CAT)]
        assert wanted(second) == [WantedFeature("same", DOG)]
        # What one of them has, the other cannot give.
        supply(second, "same", CAT)
        supply(second, "same", DOG)
        assert second.finish("same")["same"][0] == told("same", ["dog"])
        assert first.receive(EngineOutputs, timeout_s=0.2) is None
        supply(first, "same", CAT)
        assert first.finish("same")["same"][0] == told("same", ["cat"])


def test_what_was_not_asked_for_is_dropped_and_counted(endpoint: str, join: Connect) -> None:
    with running_server(endpoint, engine=picture_engine()) as server:
        frontend = join()
        ask(frontend, "r", "cat", "dog")
        wanted(frontend, 2)
        supply(frontend, "r", key_of("horse"))
        supply(frontend, "r", CAT, CAT)
        supply(frontend, "r", b"")
        supply(frontend, "r", DOG)
        assert frontend.finish("r")["r"][0] == told("r", ["cat", "dog"])
        assert server.link.drops.counts == {"unwanted_feature": 3}


def test_what_comes_for_a_request_that_is_over_is_passed_over(endpoint: str, join: Connect) -> None:
    with running_server(endpoint, engine=picture_engine()) as server:
        frontend = join()
        ask(frontend, "aborted", "cat")
        wanted(frontend)
        frontend.send(AbortRequests(["aborted"]))
        supply(frontend, "aborted", CAT)
        supply(frontend, "unknown", CAT)
        # The same id is another request: what was promised to the old one is not taken for its.
        ask(frontend, "aborted", "dog")
        assert wanted(frontend) == [WantedFeature("aborted", DOG)]
        supply(frontend, "aborted", CAT)
        supply(frontend, "aborted", DOG)
        assert frontend.finish("aborted")["aborted"][0] == told("aborted", ["dog"])
        wait_until(lambda: is_idle(server.engine))
        assert server.link.drops.counts == {"unwanted_feature": 1}


def test_a_picture_that_cannot_be_had_ends_its_request_alone(endpoint: str, join: Connect) -> None:
    with running_server(endpoint, engine=picture_engine()) as server:
        frontend = join()
        ask(frontend, "broken", "cat", "dog")
        ask(frontend, "whole", "horse")
        wanted(frontend, 3)
        error = RequestError("invalid", "messages[0].content[1]: the picture is gone", "messages")
        frontend.send(SupplyFeature("broken", DOG, error=error))
        supply(frontend, "whole", key_of("horse"))
        finished = frontend.finish("broken", "whole")
        assert finished["broken"][1].error == error and finished["broken"][1].finish_reason == "error"
        assert finished["whole"][0] == told("whole", ["horse"])
        # Neither is the other one taken any more.
        supply(frontend, "broken", CAT)
        wait_until(lambda: is_idle(server.engine))


def test_an_engine_that_waits_for_pictures_sleeps_and_serves_others(endpoint: str, join: Connect) -> None:
    with running_server(endpoint, engine=picture_engine()) as server:
        frontend = join()
        ask(frontend, "waits", "cat")
        wanted(frontend)
        engine_thread = next(thread for thread in threading.enumerate() if thread.name == "engine")
        clock = time.pthread_getcpuclockid(engine_thread.ident or 0)
        cpu_s, started_s = time.clock_gettime(clock), time.monotonic()
        time.sleep(0.5)
        assert time.clock_gettime(clock) - cpu_s < 0.2 * (time.monotonic() - started_s)
        steps = server.engine.stats().steps
        frontend.add("text", [1, 2], 5)
        assert frontend.finish("text")["text"][0] == continuation([1, 2], 5)
        assert server.engine.stats().steps == steps + 5
        supply(frontend, "waits", CAT)
        assert frontend.finish("waits")["waits"][0] == told("waits", ["cat"])


def test_a_picture_that_never_comes_is_not_waited_for_for_ever(endpoint: str, join: Connect) -> None:
    with running_server(endpoint, engine=picture_engine(feature_timeout_s=0.5)) as server:
        frontend = join()
        ask(frontend, "r", "cat")
        wanted(frontend)
        _, last = frontend.finish("r")["r"]
        assert last.finish_reason == "error" and last.error is not None
        wait_until(lambda: is_idle(server.engine))


@pytest.mark.parametrize("leave", ["goodbye", "silence", "hello again", "unreadable"])
def test_a_frontend_that_goes_away_after_promising_leaves_nothing(endpoint: str, join: Connect, leave: str) -> None:
    settings = FAST if leave != "silence" else FAST.__class__(heartbeat_interval_s=0.1, frontend_timeout_s=0.5)
    with running_server(endpoint, engine=picture_engine(), settings=settings) as server:
        frontend = join()
        ask(frontend, "nothing came", "cat", "dog")
        ask(frontend, "half came", "horse", "cow")
        wanted(frontend, 4)
        supply(frontend, "half came", key_of("horse"))
        if leave == "goodbye":
            frontend.send(Goodbye())
        elif leave == "hello again":
            frontend.send(Hello())
        elif leave == "unreadable":
            frontend.socket.send_multipart([b"FWRD", b""])
        wait_until(lambda: not server.engine.has_unfinished_requests())
        wait_until(lambda: is_idle(server.engine))
        other = join()
        ask(other, "r", "cat")
        wanted(other)
        supply(other, "r", CAT)
        assert other.finish("r")["r"][0] == told("r", ["cat"])


def test_a_draining_engine_waits_for_pictures_as_long_as_it_may(endpoint: str, join: Connect) -> None:
    with running_server(endpoint, engine=picture_engine()) as server:
        frontend = join()
        ask(frontend, "comes", "cat")
        wanted(frontend)
        server.drain(60)
        supply(frontend, "comes", CAT)
        assert frontend.finish("comes")["comes"][0] == told("comes", ["cat"])
        assert isinstance(frontend.receive(Goodbye), Goodbye)
    with running_server(endpoint, engine=picture_engine()) as server:
        frontend = join()
        ask(frontend, "never comes", "cat")
        wanted(frontend)
        server.drain(0.2)
        assert isinstance(frontend.receive(Goodbye), Goodbye)


def test_a_frontend_that_does_not_read_is_asked_when_it_does(
    endpoint: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_requests = 2000
    # Those that are asked by default would all find room in the socket.
    monkeypatch.setattr(feature_inputs, "MAX_ASKED", num_requests)
    with running_server(endpoint, engine=picture_engine()) as server:
        frontend = connect(queue_messages=1)
        frontend.hello()
        for n in range(num_requests):
            ask(frontend, f"r{n:04}", f"picture {n}", max_tokens=1)
        assert [feature.request_id for feature in wanted(frontend, num_requests)] == [
            f"r{n:04}" for n in range(num_requests)
        ]
        frontend.send(Goodbye())
        wait_until(lambda: is_idle(server.engine))


def test_large_inputs_hold_up_no_other_frontend(endpoint: str, join: Connect) -> None:
    input_bytes, num_pictures = 50 << 20, 6
    with running_server(endpoint, engine=picture_engine(step_s=0.005)) as server:
        heavy, light = join(), join()
        names = [f"picture {n}" for n in range(num_pictures)]
        ask(heavy, "heavy", *names, input_bytes=input_bytes)
        keys = [feature.key for feature in wanted(heavy, num_pictures)]
        light.add("light", [1], 2000)
        next(light.outputs())
        received: list[float] = []
        reading = True

        def read() -> None:
            while reading:
                if light.receive(object, timeout_s=0.1) is not None:
                    received.append(time.monotonic())

        reader = threading.Thread(target=read)
        reader.start()
        began_s = time.monotonic()
        supply(heavy, "heavy", *keys, input_bytes=input_bytes)
        assert heavy.finish("heavy")["heavy"][0] == told("heavy", names)
        ended_s = time.monotonic()
        reading = False
        reader.join()
        light.send(Goodbye())
        during = [began_s, *(at_s for at_s in received if began_s <= at_s <= ended_s), ended_s]
        longest_s = max(after - before for before, after in pairwise(during))
        assert longest_s < 0.5 * (ended_s - began_s), (longest_s, ended_s - began_s, len(during))
        wait_until(lambda: is_idle(server.engine))


def test_inputs_are_neither_copied_nor_kept(endpoint: str, join: Connect) -> None:
    engine: EngineCore = picture_engine()
    came: list[weakref.ref[np.ndarray]] = []
    supply_feature = engine.supply_feature

    def watch(request_id: str, key: bytes, inputs: dict[str, np.ndarray], error: RequestError | None = None) -> None:
        pixels = inputs["pixel_values"]
        assert isinstance(pixels.base, zmq.Frame)
        np.testing.assert_array_equal(pixels, inputs_of(key, 1 << 20)["pixel_values"])
        came.append(weakref.ref(pixels))
        supply_feature(request_id, key, inputs, error)

    engine.supply_feature = watch  # type: ignore[method-assign]
    with running_server(endpoint, engine=engine):
        frontend = join()
        ask(frontend, "r", "cat", input_bytes=1 << 20)
        wanted(frontend)
        supply(frontend, "r", CAT, input_bytes=1 << 20)
        assert frontend.finish("r")["r"][0] == told("r", ["cat"])
        # Nothing else happens meanwhile that would drive them out.
        wait_until(lambda: is_idle(engine) and came and came[0]() is None)
