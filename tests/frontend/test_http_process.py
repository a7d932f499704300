"""The HTTP process stops when it is told to, whenever that is, and ends every answer it has begun."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from frontend.api_key import api_key_environment
from frontend.http_config import EngineAddress, HttpConfig, child_argv
from tests.http_peers import http_process
from tests.wire_peers import ROOT, private_endpoint, start_engine

# `EnginePool.start` comes before uvicorn listens to signals.
_TOLD_EARLY = """
import os, signal, sys
import frontend.http_process as http_process

start = http_process.EnginePool.start

async def start_and_be_told(self):
    await start(self)
    os.kill(os.getpid(), signal.SIGTERM)

http_process.EnginePool.start = start_and_be_told
sys.exit(http_process.main())
"""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[str]:
    """The endpoint of an engine that takes its time."""
    endpoint = private_endpoint(tmp_path)
    process = start_engine(endpoint, step_s=0.05)
    yield endpoint
    process.terminate()
    process.wait()


def endless(stream: bool) -> dict[str, object]:
    return {"prompt": [5], "max_tokens": 60_000, "ignore_eos": True, "stream": stream}


async def accepts_connections(url: str) -> bool:
    address = urlsplit(url)
    try:
        _, writer = await asyncio.open_connection(address.hostname, address.port)
    except ConnectionError:
        return False
    writer.close()
    return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_requests_that_take_too_long_are_told_and_end_properly(
    engine: str, chat_model_dir: Path, number: signal.Signals
) -> None:
    config = HttpConfig(
        engines=(EngineAddress(engine),),
        model_dir=str(chat_model_dir),
        model_names=("tiny",),
        port=0,
        drain_timeout_s=0.5,
    )
    with http_process(config) as (process, url):
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            whole = asyncio.create_task(http.post("/v1/completions", json=endless(stream=False)))
            async with http.stream("POST", "/v1/completions", json=endless(stream=True)) as streamed:
                events = streamed.aiter_lines()
                assert (await anext(events)).startswith("data: {")
                while (await http.get("/health")).json()["num_requests"] < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                process.send_signal(number)
                # httpx raises if the chunked body breaks off.
                *_, last = [line async for line in events if line]
            answer = await whole
        _, log = process.communicate(timeout=30)
    error = {
        "message": "the server is shutting down",
        "type": "service_unavailable_error",
        "param": None,
        "code": "shutting_down",
    }
    assert json.loads(last.removeprefix("data: ")) == {"error": error}
    assert answer.status_code == 503
    assert answer.json() == {"error": error}
    assert process.returncode == 0
    assert "drain_timeout requests=2" in log
    assert "Traceback" not in log
    assert "ERROR" not in log


async def test_requests_that_a_second_signal_ends_are_told_the_same(engine: str, chat_model_dir: Path) -> None:
    config = HttpConfig(
        engines=(EngineAddress(engine),),
        model_dir=str(chat_model_dir),
        model_names=("tiny",),
        port=0,
        drain_timeout_s=60,
    )
    with http_process(config) as (process, url):
        async with (
            httpx.AsyncClient(base_url=url, timeout=30) as http,
            http.stream("POST", "/v1/completions", json=endless(stream=True)) as streamed,
        ):
            events = streamed.aiter_lines()
            await anext(events)
            process.terminate()
            # Until it has heard the first.
            while await accepts_connections(url):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGINT)
            *_, last = [line async for line in events if line]
        process.communicate(timeout=30)
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the server is shutting down"
    assert process.returncode == 0


async def test_requests_that_end_in_time_are_not_disturbed(engine: str, chat_model_dir: Path) -> None:
    config = HttpConfig(engines=(EngineAddress(engine),), model_dir=str(chat_model_dir), model_names=("tiny",), port=0)
    with http_process(config) as (process, url):
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            async with http.stream(
                "POST", "/v1/completions", json=endless(stream=True) | {"max_tokens": 10}
            ) as streamed:
                events = streamed.aiter_lines()
                await anext(events)
                process.terminate()
                *_, last = [line async for line in events if line]
            assert last == "data: [DONE]"
        _, log = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "drain_timeout" not in log


def test_a_client_that_takes_no_end_is_cut_off(engine: str, chat_model_dir: Path) -> None:
    config = HttpConfig(
        engines=(EngineAddress(engine),),
        model_dir=str(chat_model_dir),
        model_names=("tiny",),
        port=0,
        drain_timeout_s=0.1,
    )
    with http_process(config) as (process, url):
        address = urlsplit(url)
        with socket.create_connection((address.hostname, address.port)) as connection:
            # It never sends all of its request.
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{")
            httpx.get(f"{url}/health").raise_for_status()
            process.terminate()
            _, log = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "drain_timeout requests=1" in log
    assert "Traceback" not in log


def test_a_signal_before_uvicorn_listens_to_it_is_not_lost(tmp_path: Path, chat_model_dir: Path) -> None:
    config = HttpConfig(
        engines=(EngineAddress(private_endpoint(tmp_path)),),
        model_dir=str(chat_model_dir),
        model_names=("tiny",),
        port=0,
    )
    argv = [sys.executable, "-c", _TOLD_EARLY, "--config", msgspec.json.encode(config).decode()]
    result = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines()[-1].endswith("http_stopped")


@pytest.mark.parametrize("api_keys", [(), ("k3y",)])
def test_the_line_to_paste_works(engine: str, chat_model_dir: Path, api_keys: tuple[str, ...]) -> None:
    config = HttpConfig(engines=(EngineAddress(engine),), model_dir=str(chat_model_dir), model_names=("tiny",), port=0)
    environment = os.environ | api_key_environment(api_keys)
    with subprocess.Popen(child_argv(config), cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = next(line for line in process.stdout if line.startswith("curl "))
            assert not any(key in line for key in api_keys)
            _, url, *options = shlex.split(line.replace("KEY", "k3y"))
            given = list(zip(options[::2], options[1::2], strict=True))
            headers = dict(value.split(": ", 1) for flag, value in given if flag == "-H")
            body = json.loads(dict(given)["-d"]) | {"max_tokens": 1}
            assert httpx.post(url, headers=headers, json=body, timeout=30).status_code == 200
        finally:
            process.kill()
