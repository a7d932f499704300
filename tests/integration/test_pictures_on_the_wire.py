"""What travels for a picture, and what becomes of a request that waits for one when a process dies."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest

from frontend.engine_client import EngineClient
from frontend.engine_errors import EngineUnavailableError
from frontend.engine_pool import EnginePool, PooledStream
from ipc.codec import Decoder
from ipc.messages import AddRequest, FrontendMessage, SupplyFeature
from tests.fake_runner import continuation
from tests.meddling_proxy import Direction, Frames, meddling_proxy
from tests.pictures_in_prompts import Pictures, key_of, picture_engine, pictured
from tests.wire_peers import ROOT, is_idle, private_endpoint, request, running_server, start_engine, wait_until

CAT, DOG = key_of("cat"), key_of("dog")


async def until(condition: Callable[[], object]) -> None:
    await asyncio.to_thread(wait_until, condition)


@asynccontextmanager
async def pool_of(*endpoints: str) -> AsyncIterator[EnginePool]:
    pool = EnginePool(
        [
            EngineClient(endpoint, index=index, heartbeat_interval_s=0.1, heartbeat_timeout_s=2.0)
            for index, endpoint in enumerate(endpoints)
        ]
    )
    await pool.start()
    try:
        await asyncio.gather(*(engine.wait_ready(20) for engine in pool.engines))
        yield pool
    finally:
        await pool.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


async def tokens_of(stream: PooledStream) -> list[int]:
    return [token async for output in stream for token in output.new_token_ids]


def promising_frontend(endpoint: str, num_requests: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.fake_frontend", endpoint, str(num_requests), "--promise"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)


class Traffic:
    """Lets everything pass, and keeps what frontends sent: of each kind, the bytes of each message."""

    def __init__(self) -> None:
        self.num_bytes: dict[type, list[int]] = {AddRequest: [], SupplyFeature: []}
        self._decoder: Decoder[FrontendMessage] = Decoder(FrontendMessage)

    def __call__(self, direction: Direction, frames: Frames) -> list[Frames]:
        if direction == "to_engine" and (sent := type(self._decoder.decode(frames).message)) in self.num_bytes:
            self.num_bytes[sent].append(sum(map(len, frames)))
        return [frames]


async def test_a_picture_is_sent_once_and_then_costs_less_than_a_kilobyte(tmp_path: Path, stack: ExitStack) -> None:
    endpoint, input_bytes = private_endpoint(tmp_path), 1 << 20
    server = stack.enter_context(running_server(endpoint, engine=picture_engine()))
    proxy = stack.enter_context(meddling_proxy(f"ipc://{tmp_path}/p", endpoint))
    proxy.meddle = traffic = Traffic()
    pictures = Pictures(input_bytes=input_bytes)
    async with pool_of(f"ipc://{tmp_path}/p") as pool:
        for n in range(3):
            asked = pictured(f"r{n}", ["cat", "dog"], picture_tokens=500, input_bytes=input_bytes)
            async with pool.submit(asked, pictures) as stream:
                assert await tokens_of(stream) == continuation(asked.prompt_token_ids, 5)
        async with pool.submit(request("text", asked.prompt_token_ids, 5)) as stream:
            await tokens_of(stream)
        first, *repeated, without = traffic.num_bytes[AddRequest]
        assert [first, *repeated] == [first] * 3 and first - without < 1024
        assert len(traffic.num_bytes[SupplyFeature]) == 2
        assert sum(traffic.num_bytes[SupplyFeature]) < 2 * (input_bytes + 1024)
        assert pictures.asked == {CAT: 1, DOG: 1}
        [engine] = pool.engines
        assert (engine.num_features_supplied, engine.num_feature_bytes_supplied) == (2, 2 * input_bytes)
        stats = server.engine.stats()
        assert (stats.feature_inputs_received, stats.feature_input_bytes_received) == (2, 2 * input_bytes)
        assert (stats.encoder_calls, stats.feature_input_bytes) == (2, 0)
    await until(lambda: is_idle(server.engine))


async def test_another_engine_asks_again_when_one_dies_waiting(tmp_path: Path, stack: ExitStack) -> None:
    endpoints = [private_endpoint(tmp_path), f"ipc://{tmp_path}/other"]
    dies = stack.enter_context(start_engine(endpoints[0], 0.0, "--pictures"))
    stack.callback(dies.kill)
    server = stack.enter_context(running_server(endpoints[1], engine=picture_engine()))
    pictures = Pictures()
    pictures.ready.clear()
    async with pool_of(*endpoints) as pool:
        asked = pictured("r", ["cat", "dog"])
        async with pool.submit(asked, pictures) as stream:
            reading = asyncio.create_task(tokens_of(stream))
            await until(lambda: len(pictures.waiting) == 2)
            assert pool.engines[0].num_in_flight == 1
            dies.kill()
            await until(lambda: pictures.asked == {CAT: 2, DOG: 2})
            # For the first engine nobody prepares anything any more.
            assert len(pictures.waiting) == 2
            pictures.ready.set()
            assert await reading == continuation(asked.prompt_token_ids, 5)
            assert stream.engine_index == 1
        assert [engine.num_features_supplied for engine in pool.engines] == [0, 2]
        assert pool.num_in_flight == 0
    await until(lambda: is_idle(server.engine))


async def test_without_another_engine_the_stream_fails_and_the_source_is_left_alone(
    tmp_path: Path, stack: ExitStack
) -> None:
    endpoint = private_endpoint(tmp_path)
    dies = stack.enter_context(start_engine(endpoint, 0.0, "--pictures"))
    stack.callback(dies.kill)
    pictures = Pictures()
    pictures.ready.clear()
    async with pool_of(endpoint) as pool:
        async with pool.submit(pictured("r", ["cat"]), pictures) as stream:
            reading = asyncio.create_task(tokens_of(stream))
            await until(lambda: pictures.waiting)
            dies.kill()
            with pytest.raises(EngineUnavailableError, match="closed the connection"):
                await reading
        await until(lambda: not pictures.waiting)
        assert pool.num_in_flight == 0
        # Its successor is asked for what it can do.
        stack.callback(stack.enter_context(start_engine(endpoint, 0.0, "--pictures")).kill)
        await pool.engines[0].wait_ready(20)
        pictures.ready.set()
        asked = pictured("r", ["cat"])
        async with pool.submit(asked, pictures) as stream:
            assert await tokens_of(stream) == continuation(asked.prompt_token_ids, 5)


async def test_a_frontend_killed_after_promising_leaves_nothing(tmp_path: Path, stack: ExitStack) -> None:
    endpoint = private_endpoint(tmp_path)
    server = stack.enter_context(running_server(endpoint, engine=picture_engine()))
    pictures = Pictures()
    async with pool_of(endpoint) as pool:
        with promising_frontend(endpoint, 5) as process:
            assert process.stdout is not None
            assert await asyncio.to_thread(process.stdout.readline) == b"running\n"
            # One of those pictures is another frontend's, too, and was not asked for twice.
            asked = pictured("r", ["picture 0"])
            async with pool.submit(asked, pictures) as stream:
                reading = asyncio.create_task(tokens_of(stream))
                await until(lambda: server.engine.stats().num_waiting == 6)
                assert not pictures.asked
                process.kill()
                assert await reading == continuation(asked.prompt_token_ids, 5)
        assert pictures.asked == {key_of("picture 0"): 1}
    await until(lambda: is_idle(server.engine))
