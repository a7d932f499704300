"""Over TCP: the right keys make a session like any other, wrong ones a reason, and never a hang."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine_core.frontend_link import LinkSettings
from frontend.engine_client import EngineClient
from ipc.curve import EngineKeys, FrontendKeys
from ipc.key_files import load_key_pair, load_public_key, write_key_set
from tests.fake_runner import continuation
from tests.wire_peers import free_tcp_endpoint, is_idle, request, running_server, wait_until


def made(directory: Path) -> tuple[EngineKeys, FrontendKeys]:
    write_key_set(directory)
    engine = EngineKeys(load_key_pair(directory / "engine.key"), directory / "client.pub")
    return engine, FrontendKeys(load_key_pair(directory / "client.key"), load_public_key(directory / "engine.pub"))


def link_settings(keys: EngineKeys | None) -> LinkSettings:
    return LinkSettings(heartbeat_interval_s=0.1, frontend_timeout_s=5.0, keys=keys, insecure=keys is None)


async def state_with(endpoint: str, keys: FrontendKeys | None) -> tuple[str, str]:
    """What becomes of a client with these keys."""
    client = EngineClient(endpoint, keys=keys, insecure=keys is None, heartbeat_interval_s=0.1)
    await client.start()
    await asyncio.to_thread(wait_until, lambda: client.state != "connecting")
    state = client.state, str(client.down_reason)
    await client.close()
    return state


@pytest.mark.parametrize("with_keys", [True, False])
async def test_a_session_over_tcp(tmp_path: Path, with_keys: bool) -> None:
    engine_keys, frontend_keys = made(tmp_path / "keys") if with_keys else (None, None)
    endpoint = free_tcp_endpoint()
    with running_server(endpoint, settings=link_settings(engine_keys)) as server:
        client = EngineClient(endpoint, keys=frontend_keys, insecure=not with_keys, heartbeat_interval_s=0.1)
        await client.start()
        await client.wait_ready(20)
        async with client.submit(request("r", [5], 200)) as stream:
            assert [token async for output in stream for token in output.new_token_ids] == continuation([5], 200)
        await client.close()
        await asyncio.to_thread(wait_until, lambda: is_idle(server.engine))


async def test_wrong_keys_are_told_from_one_another(tmp_path: Path) -> None:
    engine_keys, frontend_keys = made(tmp_path / "keys")
    _, strange = made(tmp_path / "strange")
    endpoint = free_tcp_endpoint()
    with running_server(endpoint, settings=link_settings(engine_keys)):
        for keys, reason in (
            (FrontendKeys(strange.own, frontend_keys.engine), "not authorised: the engine does not know"),
            (strange, "not authorised: the engine does not have the key"),
            (None, "not authorised: it seems that the engine wants keys"),
        ):
            state, told = await state_with(endpoint, keys)
            assert state == "down" and told.startswith(reason)
        assert await state_with(endpoint, frontend_keys) == ("ready", "None")


async def test_an_engine_without_keys_is_not_trusted(tmp_path: Path) -> None:
    _, frontend_keys = made(tmp_path / "keys")
    endpoint = free_tcp_endpoint()
    with running_server(endpoint, settings=link_settings(None)):
        state, told = await state_with(endpoint, frontend_keys)
        assert state == "down" and told.startswith("not authorised: the engine does not have the key")


async def test_a_server_that_only_accepts_is_not_waited_for(tmp_path: Path) -> None:
    _, frontend_keys = made(tmp_path / "keys")
    server = await asyncio.start_server(lambda *_: asyncio.sleep(3600), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    client = EngineClient(
        f"tcp://{host}:{port}", keys=frontend_keys, heartbeat_interval_s=0.05, heartbeat_timeout_s=0.2
    )
    await client.start()
    first = client._session
    await asyncio.to_thread(wait_until, lambda: client._session is not first and client._session is not None)
    assert client.state == "connecting"
    await client.close()
    server.close()


@pytest.mark.parametrize(("keys", "complaint"), [(None, "over tcp:// anybody"), ("some", "keys are for tcp://")])
def test_no_client_without_protection(tmp_path: Path, keys: str | None, complaint: str) -> None:
    endpoint = "ipc:///run/engine" if keys else "tcp://127.0.0.1:5555"
    with pytest.raises(ValueError, match=complaint):
        EngineClient(endpoint, keys=made(tmp_path / "keys")[1] if keys else None)
