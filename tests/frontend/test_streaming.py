"""Clients that go away, and clients that read slowly."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from frontend.prompt.tokenizer import ModelTokenizer
from ipc.vocabulary import EngineRequest, RequestOutput
from tests.frontend.live_app import live_app
from tests.frontend.scripted_engine import ScriptedEngine, says

LIVENESS_S = 20.0


async def never(request: EngineRequest) -> AsyncGenerator[RequestOutput]:
    await asyncio.Event().wait()
    yield RequestOutput(request.request_id, [])


async def for_ever(request: EngineRequest) -> AsyncGenerator[RequestOutput]:
    while True:
        await asyncio.sleep(0.001)
        yield RequestOutput(request.request_id, [70] * 20)


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(says([]))


@pytest.fixture(scope="module")
def url(engine: ScriptedEngine, chat_tokenizer: ModelTokenizer) -> Iterator[str]:
    with live_app(engine, chat_tokenizer) as url:
        yield url


def ask(url: str, path: str, **body: object) -> socket.socket:
    address = urlsplit(url)
    connection = socket.create_connection((address.hostname, address.port), timeout=LIVENESS_S)
    content = json.dumps(body).encode()
    connection.sendall(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def eventually(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIVENESS_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [never, for_ever])
@pytest.mark.parametrize(
    ("path", "body", "num_requests"),
    [
        ("/v1/chat/completions", CHAT, 1),
        ("/v1/completions", {"prompt": ["a", "b", "c"]}, 3),
        ("/v1/messages", CHAT | {"max_tokens": 200}, 1),
    ],
)
def test_a_client_that_goes_away_ends_its_requests(
    engine: ScriptedEngine,
    url: str,
    script: Callable[[EngineRequest], AsyncGenerator[RequestOutput]],
    stream: bool,
    path: str,
    body: dict[str, object],
    num_requests: int,
) -> None:
    engine.script = script
    engine.aborted.clear()
    connection = ask(url, path, stream=stream, **body)
    eventually(lambda: engine.num_in_flight == num_requests)
    if stream and script is for_ever:
        assert connection.recv(10).startswith(b"HTTP/1.1 2")
    connection.close()
    eventually(lambda: engine.num_in_flight == 0)
    assert len(engine.aborted) == num_requests


def test_clients_that_go_away_are_no_news(engine: ScriptedEngine, url: str, caplog: pytest.LogCaptureFixture) -> None:
    engine.script = for_ever
    with caplog.at_level(logging.WARNING):
        for stream in (False, True):
            connection = ask(url, "/v1/chat/completions", stream=stream, **CHAT)
            eventually(lambda: engine.num_in_flight == 1)
            if stream:
                assert connection.recv(1000)
            connection.close()
            eventually(lambda: engine.num_in_flight == 0)
        with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port)) as uploading:
            uploading.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{")
        # Answered after them, on the same event loop.
        httpx.get(f"{url}/health").raise_for_status()
    assert not caplog.records


def test_a_slow_reader_makes_its_stream_wait(engine: ScriptedEngine, url: str) -> None:
    num_outputs = 0

    async def counted(request: EngineRequest) -> AsyncGenerator[RequestOutput]:
        nonlocal num_outputs
        while True:
            num_outputs += 1
            yield RequestOutput(request.request_id, [70] * 100)
            await asyncio.sleep(0)

    engine.script = counted
    connection = ask(url, "/v1/chat/completions", stream=True, **CHAT)
    eventually(lambda: num_outputs > 10)
    last = -1

    def stands_still() -> bool:
        nonlocal last
        before, last = last, num_outputs
        time.sleep(0.3)
        return before == num_outputs

    eventually(stands_still)
    stood_at = num_outputs
    while num_outputs == stood_at:
        assert connection.recv(1 << 20)
    connection.close()
    eventually(lambda: engine.num_in_flight == 0)
