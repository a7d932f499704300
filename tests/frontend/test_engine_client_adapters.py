"""What a client knows of its engine's adapters, and how it has them changed, over the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
import zmq.asyncio

from frontend.engine_client import EngineClient, Occasion
from frontend.engine_errors import EngineUnavailableError, RequestRefusedError
from ipc.messages import AdapterAnswer, Adapters, Goodbye, LoadAdapter, UnloadAdapter
from ipc.vocabulary import AdapterInfo, RequestError
from tests.bare_engine import BareEngine, keep_alive
from tests.frontend.adapter_engine import adapter
from tests.wire_peers import private_endpoint, wait_until

A, B = adapter("a", "d1"), adapter("b", "d2")


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[EngineClient]:
    client = EngineClient(private_endpoint(tmp_path), heartbeat_interval_s=0.1, heartbeat_timeout_s=2.0)
    await client.start()
    yield client
    await client.close()


@pytest.fixture
async def engine(client: EngineClient) -> AsyncIterator[BareEngine]:
    context = zmq.asyncio.Context()
    yield BareEngine(context, client.endpoint)
    context.destroy(linger=0)


async def test_it_hears_of_them_with_each_session_and_each_change(client: EngineClient, engine: BareEngine) -> None:
    heard: list[tuple[Occasion, list[str], list[str]]] = []

    def hear(_: EngineClient, before: Mapping[str, AdapterInfo], occasion: Occasion) -> None:
        assert client.state == "ready"
        heard.append((occasion, list(before), list(client.loaded_adapters)))

    async def session(epoch: int, adapters: list[AdapterInfo]) -> None:
        num_heard = len(heard)
        await engine.welcome(epoch, adapters)
        await asyncio.to_thread(wait_until, lambda: len(heard) > num_heard)
        await engine.tell(Adapters([B]), epoch)
        await asyncio.to_thread(wait_until, lambda: len(heard) > num_heard + 1)
        await engine.tell(Goodbye(), epoch)

    client.on_adapters = hear
    for epoch, adapters in ((7, [A]), (7, [A, B]), (8, [])):
        await session(epoch, adapters)
    assert heard == [
        ("first", [], ["a"]),
        ("changed", ["a"], ["b"]),
        ("found_again", ["b"], ["a", "b"]),
        ("changed", ["a", "b"], ["b"]),
        ("restarted", ["b"], []),
        ("changed", [], ["b"]),
    ]


async def test_what_was_loaded_and_unloaded_is_answered(client: EngineClient, engine: BareEngine) -> None:
    async def answer() -> None:
        load, _ = await engine.hear(LoadAdapter)
        assert (load.name, load.path, load.replaces, load.digest) == ("a", "/adapters/a", True, "d1")
        await engine.tell(AdapterAnswer(load.call_id, A), 1)
        unload, _ = await engine.hear(UnloadAdapter)
        assert unload.name == "a"
        await engine.tell(AdapterAnswer(unload.call_id, A), 1)

    async def work() -> None:
        await client.wait_ready(20)
        answering = asyncio.create_task(answer())
        assert await client.calls.load_adapter("a", "/adapters/a", replaces=True, digest="d1", timeout_s=20) == A
        assert await client.calls.unload_adapter("a", timeout_s=20) == A
        await answering

    await engine.welcome(1)
    await keep_alive(engine, 1, work())


async def test_refusals_and_losses_are_told(client: EngineClient, engine: BareEngine) -> None:
    async def work() -> None:
        await client.wait_ready(20)
        refusal = RequestError("invalid", "lora_path: it does not exist", "lora_path", "path_not_found")
        loading = asyncio.create_task(client.calls.load_adapter("a", "/none", timeout_s=20))
        load, _ = await engine.hear(LoadAdapter)
        await engine.tell(AdapterAnswer(load.call_id, error=refusal), 1)
        with pytest.raises(RequestRefusedError) as caught:
            await loading
        assert caught.value.error == refusal
        with pytest.raises(EngineUnavailableError, match="did not answer within"):
            await client.calls.unload_adapter("a", timeout_s=0.05)
        loading = asyncio.create_task(client.calls.load_adapter("a", "/adapters/a", timeout_s=20))
        await engine.hear(LoadAdapter)
        await engine.tell(Goodbye(), 1)
        with pytest.raises(EngineUnavailableError, match="goodbye"):
            await loading
        with pytest.raises(EngineUnavailableError):
            await client.calls.load_adapter("a", "/adapters/a", timeout_s=20)

    await engine.welcome(1)
    await keep_alive(engine, 1, work())
