"""Many streams at once over two HTTP processes and one engine, while one client has stopped reading."""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httptools
import httpx
import psutil
import pytest

from frontend.detokenizer import detokenizer_factory
from frontend.http_config import EngineAddress, HttpConfig
from frontend.prompt.tokenizer import ModelTokenizer
from ipc.process import raise_open_files_limit
from tests.fake_runner import continuation
from tests.http_peers import http_process
from tests.wire_peers import private_endpoint, start_engine

NUM_TOKENS = 25
NUM_STALLED_STREAMS = 12
# Most that any process may grow by while the stalled client's tokens are produced and everybody else is served again.
# In the large test the events it does not take weigh 70 MB, of which the kernel buffers half; as integers it is 9 MB.
MAX_GROWTH_BYTES = 16 << 20
# A frontend must not fall behind by as many steps as the engine keeps for it.
STEP_S = 0.004
LIVENESS_S = 240.0
ENGINE_CONFIG = {"max_num_seqs": 4096, "max_num_batched_tokens": 4096}


@dataclass(frozen=True)
class Stack:
    urls: tuple[str, str]
    processes: tuple[psutil.Process, ...]


@pytest.fixture
def stack(tmp_path: Path, chat_model_dir: Path) -> Iterator[Stack]:
    raise_open_files_limit()
    endpoint = private_endpoint(tmp_path)
    engine = start_engine(endpoint, STEP_S, "--num-blocks", "16384", "--config", json.dumps(ENGINE_CONFIG))
    config = HttpConfig(
        engines=(EngineAddress(endpoint),), model_dir=str(chat_model_dir), model_names=("tiny",), port=0
    )
    try:
        with ExitStack() as processes:
            log = processes.enter_context(tempfile.TemporaryFile())
            (one, first), (two, second) = (processes.enter_context(http_process(config, log=log)) for _ in range(2))
            yield Stack((first, second), tuple(psutil.Process(process.pid) for process in (engine, one, two)))
    finally:
        engine.terminate()
        engine.wait()


class StreamedAnswer:
    """An HTTP client's protocol for one streamed completion."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self.is_complete = False

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        self.is_complete = True

    def feed(self, data: bytes) -> None:
        assert data, "the connection was cut"
        self._parser.feed_data(data)

    def has_begun(self) -> bool:
        return bool(self._body)

    def events(self) -> list[dict[str, object]]:
        assert self._parser.get_status_code() == 200, self._body
        *events, done, rest = b"".join(self._body).decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def text_and_num_tokens(self) -> tuple[str, int]:
        *events, usage = self.events()
        text = "".join(choice["text"] for event in events for choice in event["choices"])  # type: ignore[attr-defined, index]
        return text, usage["usage"]["completion_tokens"]  # type: ignore[index]


@asynccontextmanager
async def asking(
    url: str, prompt: list[int], num_tokens: int, *, receive_buffer_bytes: int | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, StreamedAnswer]]:
    address = urlsplit(url)
    connection = socket.socket()
    if receive_buffer_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, (address.hostname, address.port))
    # The reader stops reading the socket when twice its limit is waiting to be taken.
    reader, writer = await asyncio.open_connection(sock=connection, limit=4096)
    body = json.dumps(
        {
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    writer.write(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
    try:
        yield reader, StreamedAnswer()
    finally:
        writer.transport.abort()


async def everybody_is_served(stack: Stack, num_streams: int, expected: dict[int, str]) -> None:
    """All streams run at the same time: none reads to its end before every one has begun."""
    all_have_begun = asyncio.Barrier(num_streams)

    async def one(n: int) -> None:
        async with asking(stack.urls[n % 2], prompt_of(n), NUM_TOKENS) as (reader, answer):
            while not answer.has_begun():
                answer.feed(await reader.read(65536))
            await all_have_begun.wait()
            while not answer.is_complete:
                answer.feed(await reader.read(65536))
            assert answer.text_and_num_tokens() == (expected[n], NUM_TOKENS)

    async with asyncio.timeout(LIVENESS_S), asyncio.TaskGroup() as streams:
        for n in range(num_streams):
            streams.create_task(one(n))


def prompt_of(n: int) -> list[int]:
    # The fake model looks at the length and the last token.
    return [7] * (1 + n // 997) + [n % 997]


async def nothing_is_in_flight(stack: Stack) -> None:
    """Return when the engine has done all that was asked of it."""
    async with asyncio.timeout(LIVENESS_S), httpx.AsyncClient(timeout=LIVENESS_S) as http:
        for url in stack.urls:
            while (await http.get(f"{url}/health")).json()["num_requests"]:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    ("num_streams", "num_stalled_tokens"), [(60, 1500), pytest.param(2000, 20_000, marks=pytest.mark.slow)]
)
@pytest.mark.timeout(3 * LIVENESS_S)
async def test_a_client_that_stops_reading_harms_nobody(
    stack: Stack, chat_tokenizer: ModelTokenizer, num_streams: int, num_stalled_tokens: int
) -> None:
    new_detokenizer = detokenizer_factory(chat_tokenizer.backend)

    def text_of(token_ids: list[int]) -> str:
        detokenizer = new_detokenizer()
        return detokenizer.push(token_ids) + detokenizer.flush()

    expected = {n: text_of(continuation(prompt_of(n), NUM_TOKENS)) for n in range(num_streams)}
    assert len(set(expected.values())) > num_streams * 0.8
    await everybody_is_served(stack, num_streams, expected)
    before_bytes = [process.memory_info().rss for process in stack.processes]
    highest_bytes = list(before_bytes)

    async def watch_memory() -> None:
        while True:
            for place, process in enumerate(stack.processes):
                highest_bytes[place] = max(highest_bytes[place], process.memory_info().rss)
            await asyncio.sleep(0.1)

    def stalled_prompt(n: int) -> list[int]:
        return [9, 9, n]

    watching = asyncio.create_task(watch_memory())
    async with AsyncExitStack() as connections:
        stalled = [
            await connections.enter_async_context(
                asking(stack.urls[0], stalled_prompt(n), num_stalled_tokens, receive_buffer_bytes=4096)
            )
            for n in range(NUM_STALLED_STREAMS)
        ]
        await everybody_is_served(stack, num_streams, expected)
        await nothing_is_in_flight(stack)
        watching.cancel()
        growth_bytes = [highest - before for highest, before in zip(highest_bytes, before_bytes, strict=True)]
        assert max(growth_bytes) < MAX_GROWTH_BYTES, growth_bytes
        # What was produced meanwhile has waited for it.
        for n, (reader, answer) in enumerate(stalled):
            async with asyncio.timeout(LIVENESS_S):
                while not answer.is_complete:
                    answer.feed(await reader.read(65536))
            text = text_of(continuation(stalled_prompt(n), num_stalled_tokens))
            assert answer.text_and_num_tokens() == (text, num_stalled_tokens)
