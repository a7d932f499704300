"""Questions to an engine are answered or fail; none waits for ever."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from frontend.engine_client import EngineClient
from frontend.engine_errors import EngineUnavailableError, RequestRefusedError
from ipc.stats import PrefixCacheReset
from tests.wire_peers import private_endpoint, request, running_server, start_engine


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return private_endpoint(tmp_path)


@pytest.fixture
async def client(endpoint: str) -> AsyncIterator[EngineClient]:
    client = EngineClient(endpoint, heartbeat_interval_s=0.1, heartbeat_timeout_s=1.0)
    await client.start()
    yield client
    await client.close()


@pytest.fixture
def slow_engine(endpoint: str) -> Iterator[subprocess.Popen[bytes]]:
    process = start_engine(endpoint, step_s=1.0)
    yield process
    process.kill()
    process.wait()


async def test_many_calls_at_once_get_each_its_answer(endpoint: str, client: EngineClient) -> None:
    with running_server(endpoint) as server:
        await client.wait_ready(20)
        async with client.submit(request("r", [5] * 33, 4)) as stream:
            async for _ in stream:
                pass
        snapshots = await asyncio.gather(*(client.calls.stats(20) for _ in range(50)))
        assert {snapshot.epoch for snapshot in snapshots} == {server.link.epoch}
        assert all(snapshot.stats == server.engine.stats() for snapshot in snapshots)
        resets = await asyncio.gather(
            *(client.calls.reset_prefix_cache(reset_running_requests=False, timeout_s=20) for _ in range(3))
        )
        # Two whole blocks, and one that was begun.
        assert resets == [PrefixCacheReset(3, 0), PrefixCacheReset(0, 0), PrefixCacheReset(0, 0)]


async def test_a_probe_tells_what_would_be_found_or_why_it_never_could(endpoint: str, client: EngineClient) -> None:
    with running_server(endpoint):
        await client.wait_ready(20)
        async with client.submit(request("r", [5] * 33, 1)) as stream:
            async for _ in stream:
                pass
        probe = await client.calls.probe_cache(request("r", [5] * 33, 1), timeout_s=20)
        assert (probe.num_hit_tokens, probe.miss_reason, probe.explanation) == (32, "none", None)
        explained = await client.calls.probe_cache(request("r", [5, 6, 7], 1), explain=True, timeout_s=20)
        assert explained.explanation is not None and explained.explanation.token_index == 1
        with pytest.raises(RequestRefusedError, match="prompt_token_ids"):
            await client.calls.probe_cache(request("r", [-1], 1), timeout_s=20)
        with pytest.raises(RequestRefusedError, match="prompt_token_ids"):
            await client.calls.probe_cache(request("r", [1 << 70], 1), timeout_s=20)


async def test_without_an_engine_a_call_fails_at_once(client: EngineClient) -> None:
    with pytest.raises(EngineUnavailableError, match="no engine has answered"):
        await client.calls.stats(300)
    with pytest.raises(EngineUnavailableError, match="no engine has answered"):
        await client.calls.reset_prefix_cache(reset_running_requests=True, timeout_s=300)


async def test_a_lost_engine_fails_what_it_was_asked(
    client: EngineClient, slow_engine: subprocess.Popen[bytes]
) -> None:
    await client.wait_ready(20)
    async with client.submit(request("r", [5], 1000)):
        while not (await client.calls.stats(20)).stats.num_running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        asked = [
            asyncio.create_task(client.calls.reset_prefix_cache(reset_running_requests=False, timeout_s=300))
            for _ in range(3)
        ]
        await asyncio.sleep(0)
        slow_engine.kill()
        async with asyncio.timeout(20):
            results = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(result) for result in results] == [EngineUnavailableError] * 3


async def test_an_answer_that_takes_too_long_is_given_up_and_ignored_when_it_comes(
    client: EngineClient, slow_engine: subprocess.Popen[bytes]
) -> None:
    await client.wait_ready(20)
    async with client.submit(request("r", [5], 1000)):
        while not (await client.calls.stats(20)).stats.num_running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        with pytest.raises(EngineUnavailableError, match=r"did not answer within 0\.01 s"):
            await client.calls.reset_prefix_cache(reset_running_requests=False, timeout_s=0.01)
        assert (await client.calls.reset_prefix_cache(reset_running_requests=True, timeout_s=20)).num_blocks_in_use == 0
    assert client.state == "ready"


async def test_closing_fails_what_was_asked(endpoint: str, slow_engine: subprocess.Popen[bytes]) -> None:
    client = EngineClient(endpoint)
    await client.start()
    await client.wait_ready(20)
    slow_engine.send_signal(signal.SIGSTOP)
    # Until then it may still answer.
    await asyncio.to_thread(os.waitid, os.P_PID, slow_engine.pid, os.WSTOPPED)
    asked = asyncio.create_task(client.calls.stats(300))
    await asyncio.sleep(0)
    await client.close()
    with pytest.raises(EngineUnavailableError, match="closed"):
        await asked
