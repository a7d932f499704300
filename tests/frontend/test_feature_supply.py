"""A picture's inputs are prepared and sent when an engine wants them, once for each time, and to nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq.asyncio

from frontend.engine_client import EngineClient
from frontend.engine_errors import EngineUnavailableError, RequestRefusedError
from frontend.feature_supply import FeatureError, FeatureSupply
from ipc.codec import encode
from ipc.messages import AbortRequests, AddRequest, EngineOutputs, Goodbye, SupplyFeature, WantFeatures
from ipc.sequence import UNCOUNTED
from ipc.vocabulary import RequestError, RequestOutput, WantedFeature
from tests.bare_engine import BareEngine, keep_alive
from tests.pictures_in_prompts import Pictures, inputs_of, key_of, pictured
from tests.wire_peers import private_endpoint, request, wait_until

CAT, DOG = key_of("cat"), key_of("dog")


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return private_endpoint(tmp_path)


@pytest.fixture
async def client(endpoint: str) -> AsyncIterator[EngineClient]:
    client = EngineClient(endpoint, heartbeat_interval_s=0.1, heartbeat_timeout_s=2.0)
    await client.start()
    yield client
    await client.close()


class Engine(BareEngine):
    """One session, in epoch 1."""

    async def want(self, *wanted: tuple[str, bytes]) -> None:
        await self.tell(WantFeatures([WantedFeature(*feature) for feature in wanted]), 1)

    async def finish(self, request_id: str, error: RequestError | None = None) -> None:
        reason = "stop" if error is None else "error"
        await self.tell(EngineOutputs([RequestOutput(request_id, [], finish_reason=reason, error=error)]), 1)

    async def supplies(self, count: int) -> list[SupplyFeature]:
        return [(await self.hear(SupplyFeature))[0] for _ in range(count)]


@pytest.fixture
async def engine(endpoint: str) -> AsyncIterator[Engine]:
    context = zmq.asyncio.Context()
    yield Engine(context, endpoint)
    context.destroy(linger=0)


@pytest.fixture
async def session(client: EngineClient, engine: Engine) -> AsyncIterator[Engine]:
    """An engine that lives, and has welcomed the client."""
    await engine.welcome(1)
    await client.wait_ready(20)
    forever = asyncio.create_task(keep_alive(engine, 1, asyncio.Event().wait()))
    yield engine
    forever.cancel()


async def until(condition: Callable[[], object]) -> None:
    await asyncio.to_thread(wait_until, condition)


def assert_inputs(supply: SupplyFeature, key: bytes, input_bytes: int = 4096) -> None:
    assert (supply.key, supply.error) == (key, None)
    expected = inputs_of(key, input_bytes)
    assert supply.inputs.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(supply.inputs[name], array)


async def test_what_is_wanted_is_sent(client: EngineClient, session: Engine) -> None:
    pictures = Pictures()
    async with client.submit(pictured("r", ["cat", "dog"]), pictures):
        added, _ = await session.hear(AddRequest)
        assert [feature.key for feature in added.request.mm_features] == [CAT, DOG]
        await session.want(("r", DOG))
        [supply] = await session.supplies(1)
        assert supply.request_id == "r"
        assert_inputs(supply, DOG)
        # Once more: the engine may have lost it in the meantime.
        await session.want(("r", DOG), ("r", CAT))
        supplies = {supply.key: supply for supply in await session.supplies(2)}
        for key in (CAT, DOG):
            assert_inputs(supplies[key], key)
    assert pictures.asked == {CAT: 1, DOG: 2}
    await until(lambda: client.num_features_supplied == 3)
    assert client.num_feature_bytes_supplied == 3 * 4096


async def test_what_was_sent_counts_though_the_request_is_over_before_anybody_looks() -> None:
    class Session:
        def send_large(self, message: SupplyFeature) -> SimpleNamespace:
            sent.set()
            return SimpleNamespace(done=False)

    sent = asyncio.Event()
    supply = FeatureSupply()
    supply.promise("r", Pictures())
    supply.answer(Session(), WantedFeature("r", CAT))  # type: ignore[arg-type]
    await asyncio.wait_for(sent.wait(), 20)
    supply.forget("r")
    assert (supply.num_features, supply.num_bytes) == (1, 4096)


async def test_what_nobody_wants_is_neither_prepared_nor_sent(client: EngineClient, session: Engine) -> None:
    pictures = Pictures()
    prompt = pictured("r", ["cat"] * 8, input_bytes=50 << 20, picture_tokens=500)
    async with client.submit(prompt, pictures) as stream:
        _, with_pictures = await session.hear(AddRequest)
        await session.finish("r")
        assert [output.finish_reason async for output in stream] == ["stop"]
    async with client.submit(request("t", prompt.prompt_token_ids)):
        _, without = await session.hear(AddRequest)
    assert sum(map(len, with_pictures)) - sum(map(len, without)) < 8 * 256
    assert not pictures.asked and client.num_features_supplied == 0


async def test_a_source_says_whose_fault_it_is(client: EngineClient, session: Engine) -> None:
    pictures = Pictures()
    reason = RequestError("invalid", "messages[0].content[1]: the picture is gone; send it again", "messages")
    pictures.failures = {CAT: FeatureError(reason), DOG: OSError("no \udcff memory" + 1000 * "!")}
    async with client.submit(pictured("r", ["cat", "dog"]), pictures) as stream:
        await session.want(("r", CAT))
        [supply] = await session.supplies(1)
        assert (supply.inputs, supply.error) == ({}, reason)
        await session.want(("r", DOG))
        [supply] = await session.supplies(1)
        assert supply.error is not None and supply.error.code == "internal"
        assert supply.error.message.startswith("a picture could not be prepared: OSError: no ? memory!")
        assert len(supply.error.message) == 500
        # The engine ends it with the reason, and so the consumer hears of it.
        await session.finish("r", reason)
        with pytest.raises(RequestRefusedError) as refused:
            await anext(stream)
        assert refused.value.error == reason
    assert client.num_features_supplied == 0


async def test_a_preparation_that_somebody_else_cancelled_is_a_failure(client: EngineClient, session: Engine) -> None:
    pictures = Pictures()
    pictures.failures[CAT] = asyncio.CancelledError()
    async with client.submit(pictured("r", ["cat"]), pictures):
        await session.want(("r", CAT))
        [supply] = await session.supplies(1)
        assert supply.error == RequestError("internal", "the preparation of a picture was given up")


@pytest.mark.parametrize(
    ("inputs", "code", "complaint"),
    [
        ({"pixel_values": np.zeros(600 << 20, np.uint8)}, "invalid", "a picture's inputs cannot be sent: too_large: a"),
        ({"pixel_values": np.array(["text"])}, "internal", "a picture could not be prepared: WireError: body"),
        ({f"x{n}": np.zeros(1) for n in range(2000)}, "internal", "a picture could not be prepared: WireError: frames"),
        ({"pixel_values": [1.0, 2.0]}, "internal", "inputs are arrays by name, not list by str"),
        ({1: np.zeros(1)}, "internal", "inputs are arrays by name, not ndarray by int"),
        (None, "internal", "a picture could not be prepared: AttributeError"),
    ],
    ids=["too large", "no numbers", "too many", "no array", "no name", "nothing"],
)
async def test_what_the_wire_does_not_carry_is_an_error(
    client: EngineClient, session: Engine, inputs: Any, code: str, complaint: str
) -> None:
    class Source:
        async def inputs(self, key: bytes) -> Any:
            return inputs

    async with client.submit(pictured("r", ["cat"]), Source()):
        await session.want(("r", CAT))
        [supply] = await session.supplies(1)
        assert supply.error is not None and supply.error.code == code
        assert complaint in supply.error.message
        # The session has not suffered.
        assert client.state == "ready" and client.num_in_flight == 1


async def test_a_request_that_came_without_pictures_has_none(client: EngineClient, session: Engine) -> None:
    async with client.submit(request("r", [1])):
        await session.want(("r", CAT))
        [supply] = await session.supplies(1)
        assert supply.error is not None and supply.error.code == "internal"


async def test_nothing_is_prepared_for_requests_that_are_over(client: EngineClient, session: Engine) -> None:
    pictures = Pictures()
    async with client.submit(pictured("aborted", ["cat"]), pictures):
        pass
    async with client.submit(pictured("finished", ["cat"]), pictures) as stream:
        await session.finish("finished")
        await anext(stream)
        await session.want(("aborted", CAT), ("finished", CAT), ("unknown", CAT))
        async with client.submit(pictured("r", ["cat"]), pictures):
            await session.want(("r", CAT))
            assert [supply.request_id for supply in await session.supplies(1)] == ["r"]
    assert pictures.asked == {CAT: 1}


async def test_an_abort_ends_the_preparation(client: EngineClient, session: Engine) -> None:
    pictures = Pictures()
    pictures.ready.clear()
    async with client.submit(pictured("r", ["cat", "dog"]), pictures):
        await session.want(("r", CAT), ("r", DOG))
        await until(lambda: len(pictures.waiting) == 2)
    await until(lambda: not pictures.waiting)
    aborted, _ = await session.hear(AbortRequests)
    assert aborted.request_ids == ["r"]
    pictures.ready.set()
    # The next that is sent is another's.
    async with client.submit(pictured("r2", ["cat"]), pictures):
        await session.want(("r2", CAT))
        assert [supply.request_id for supply in await session.supplies(1)] == ["r2"]


async def test_an_engine_that_is_lost_gets_nothing_and_its_successor_neither(
    client: EngineClient, session: Engine
) -> None:
    pictures = Pictures()
    pictures.ready.clear()
    stream = client.submit(pictured("r", ["cat"]), pictures)
    await session.want(("r", CAT))
    await until(lambda: pictures.waiting)
    await session.say(*encode(Goodbye(), 1, UNCOUNTED))
    with pytest.raises(EngineUnavailableError, match="goodbye"):
        await anext(stream)
    await until(lambda: not pictures.waiting)
    pictures.ready.set()
    # The same id again: it is another request now.
    await session.welcome(1)
    await client.wait_ready(20)
    async with client.submit(request("r", [1])):
        added, _ = await session.hear(AddRequest)
        assert added.request.prompt_token_ids == [1]
        heard = [await session.router.recv_multipart() for _ in range(3)]
        assert all(len(frames) == 3 for frames in heard)
    assert client.num_features_supplied == 0


async def test_a_slow_source_holds_up_nobody(client: EngineClient, session: Engine) -> None:
    slow, fast = Pictures(), Pictures()
    slow.ready.clear()
    async with client.submit(pictured("slow", ["cat"]), slow), client.submit(pictured("fast", ["cat"]), fast) as stream:
        await session.want(("slow", CAT), ("fast", CAT))
        assert [supply.request_id for supply in await session.supplies(1)] == ["fast"]
        await session.finish("fast")
        assert [output.finish_reason async for output in stream] == ["stop"]
        slow.ready.set()
        assert [supply.request_id for supply in await session.supplies(1)] == ["slow"]


async def test_a_full_queue_delays_inputs_and_loses_none(client: EngineClient, session: Engine) -> None:
    # Nobody reads at the other end until the client's queue is full.
    pictures = Pictures(input_bytes=1 << 16)
    async with client.submit(pictured("r", ["cat"]), pictures):
        with pytest.raises(RequestRefusedError, match="does not keep up"):
            [client.submit(request(f"filler{n}", [1] * 5000)) for n in range(10_000)]
        await session.want(("r", CAT))
        await until(lambda: pictures.asked)
        await asyncio.sleep(0.05)
        assert client.num_features_supplied == 0
        [supply] = await session.supplies(1)
        assert_inputs(supply, CAT, 1 << 16)
        await until(lambda: client.num_features_supplied == 1)


async def test_large_inputs_leave_room_between_them(client: EngineClient, session: Engine) -> None:
    """What else the engine must hear does not wait for all pictures of a long prompt."""
    num_pictures, input_bytes = 12, 8 << 20
    names = [f"picture {n}" for n in range(num_pictures)]
    async with client.submit(pictured("r", names, input_bytes=input_bytes), Pictures(input_bytes=input_bytes)):
        await session.want(*(("r", key_of(name)) for name in names))
        await until(lambda: client.num_features_supplied)
        async with client.submit(request("text", [1, 2, 3])):
            kinds: list[type] = []
            while AddRequest not in kinds[1:]:
                kinds.append(type((await session.hear(object))[0]))
    assert kinds.count(SupplyFeature) < num_pictures


async def test_closing_gives_up_what_was_promised(client: EngineClient, session: Engine) -> None:
    pictures = Pictures()
    pictures.ready.clear()
    client.submit(pictured("r", ["cat"]), pictures)
    await session.want(("r", CAT))
    await until(lambda: pictures.waiting)
    await client.close()
    assert not pictures.waiting
    while not isinstance((await session.hear(object))[0], Goodbye):
        pass
