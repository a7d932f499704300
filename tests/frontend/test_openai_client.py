"""The client of `foreword chat` and `foreword bench`, with servers that do everything a server can do wrong."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager

import pytest

from frontend.openai_client import (
    MAX_EVENT_BYTES,
    Answer,
    BrokenAnswerError,
    Delta,
    OpenAIClient,
    RefusedError,
    ServerError,
    UnreachableError,
    Usage,
)
from frontend.prompt.tokenizer import ModelTokenizer
from tests.frontend.canned_server import MODELS, answering, canned_server, chunk, events, whole
from tests.frontend.live_app import live_app
from tests.frontend.scripted_engine import ScriptedEngine, says

BODY = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}
LIVENESS_S = 20.0


@asynccontextmanager
async def client_of(url: str, *, silence_timeout_s: float = LIVENESS_S) -> AsyncIterator[OpenAIClient]:
    async with aclosing(OpenAIClient(url, silence_timeout_s=silence_timeout_s)) as client:
        yield client


async def stream(response: bytes | None, *, silence_timeout_s: float = LIVENESS_S) -> tuple[Answer, list[Delta]]:
    answer = Answer()
    with canned_server(answering(response)) as url:
        async with client_of(url, silence_timeout_s=silence_timeout_s) as client:
            return answer, [delta async for delta in client.stream(BODY, answer)]


@pytest.fixture(scope="module")
def url(chat_tokenizer: ModelTokenizer) -> Iterator[str]:
    text = "One two three."
    ids = chat_tokenizer.backend.encode(text, add_special_tokens=False).ids
    with live_app(ScriptedEngine(says(ids, finish_reason="length", num_cached_tokens=3)), chat_tokenizer) as url:
        yield url


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_foreword_itself_streamed_and_whole(url: str, suffix: str) -> None:
    streamed, whole_answer = Answer(), Answer()
    async with client_of(url + suffix) as client:
        assert (await client.find_model(None)).id == "tiny"
        deltas = [delta async for delta in client.stream(BODY | {"model": "tiny"}, streamed)]
        await client.ask(BODY | {"model": "tiny"}, whole_answer)
    assert "".join(delta.text for delta in deltas) == streamed.text == whole_answer.text == "One two three."
    assert streamed.usage == whole_answer.usage
    assert streamed.usage is not None
    assert streamed.usage.cached_tokens == 3
    assert streamed.finish_reason == whole_answer.finish_reason == "length"
    assert len(streamed.arrivals_s) > 1 and streamed.arrivals_s == sorted(streamed.arrivals_s)
    assert streamed.ttft_s is not None and 0 < streamed.ttft_s <= streamed.total_s
    assert streamed.decode_tokens_per_s is not None
    assert whole_answer.decode_tokens_per_s is None


async def test_text_with_line_separators_of_every_kind_stays_one_event() -> None:
    text = "a\u2028b\x85c\u2029d"
    raw = json.dumps(chunk(text, "stop"), ensure_ascii=False).encode()
    answer, _ = await stream(events(raw))
    assert answer.text == text


async def test_thoughts_are_not_part_of_the_answer_but_count_as_arrived() -> None:
    thought = {"choices": [{"delta": {"reasoning_content": "hm"}}]}
    answer, deltas = await stream(events(thought, chunk("yes", "stop")))
    assert deltas == [Delta("reasoning", "hm"), Delta("answer", "yes")]
    assert answer.text == "yes"
    assert len(answer.arrivals_s) == 2


async def test_what_is_left_out_and_what_is_null() -> None:
    answer, deltas = await stream(
        events({}, {"choices": None, "usage": None}, {"choices": [{"delta": None}]}, chunk(None, "stop"))
    )
    assert not deltas
    assert (answer.finish_reason, answer.usage) == ("stop", None)
    assert answer.ttft_s is not None


async def test_usage_without_details() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": None}
    answer, _ = await stream(events(chunk("a"), chunk("b", "stop"), {"choices": [], "usage": usage}))
    assert answer.usage == Usage(5, 2, None)


@pytest.mark.parametrize(
    ("response", "said"),
    [
        (events(chunk("a"), done=False), "the stream ended before the answer did"),
        (events(chunk("a"), done=False, content_length=10_000), "the connection to the server broke"),
        (events(chunk("a"), {"error": {"message": "out of luck"}}), "broke the answer off: out of luck"),
        (events(chunk("a"), b"{nonsense"), "not the OpenAI API's"),
        (events(b"\xff\xfe"), "not the OpenAI API's"),
        (events({"choices": "many"}), "not the OpenAI API's"),
        (whole(b"<html>hello</html>", content_type="text/html"), "the stream ended before the answer did (text/html)"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "the connection to the server broke"),
        (b"", "the connection to the server broke"),
        (events(b"x" * (2 * MAX_EVENT_BYTES)), "event of more than"),
    ],
)
async def test_an_answer_that_is_none(response: bytes, said: str) -> None:
    with pytest.raises(BrokenAnswerError) as error:
        await stream(response)
    assert said in str(error.value)


async def test_a_connection_that_is_reset() -> None:
    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        # At once, whatever is still under way.
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async with await asyncio.start_server(reset, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        async with client_of(f"http://{host}:{port}") as client:
            with pytest.raises(BrokenAnswerError) as error:
                await client.ask(BODY, Answer())
    # The library has no words for it.
    assert str(error.value) == "the connection to the server broke: ReadError"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error": {"message": "too long", "type": "invalid_request_error"}}', "the server answered 400: too long"),
        (b'{"object": "error", "message": "too long"}', "the server answered 400: too long"),
        (b'{"detail": [{"loc": ["body"]}]}', 'the server answered 400: [{"loc":["body"]}]'),
        (b"it\x1b[1m hurts\x07\r\nmuch", "the server answered 400: it[1m hurts much"),
        (b"", "the server answered 400: Bad Request"),
    ],
)
async def test_the_reason_of_a_refusal(body: bytes, said: str) -> None:
    with pytest.raises(RefusedError) as error:
        await stream(whole(body, status="400 Bad Request"))
    assert str(error.value) == said
    assert error.value.status == 400


async def test_a_redirect_is_told_not_followed() -> None:
    response = b"HTTP/1.1 307 Moved\r\nlocation: https://elsewhere/v1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    with pytest.raises(RefusedError, match="look at https://elsewhere/v1"):
        await stream(response)


async def test_a_server_that_says_nothing() -> None:
    with pytest.raises(UnreachableError, match=r"said nothing for 0\.2 s"):
        await stream(None, silence_timeout_s=0.2)


async def test_nobody_there() -> None:
    with canned_server(answering(None)) as url:
        pass
    async with client_of(url) as client:
        with pytest.raises(UnreachableError, match=f"no server answers at {url}/v1"):
            await client.find_model("any")


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://x", "http://", "http://[::1", "http://x:99999", "http://\n"]
)
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ValueError, match="is no URL"):
        OpenAIClient(url)


@pytest.mark.parametrize("key", ["schlüssel", "two\nlines"])
def test_what_is_no_key(key: str) -> None:
    with pytest.raises(ValueError, match="the API key"):
        OpenAIClient("http://127.0.0.1", api_key=key)


async def test_a_model_is_found_by_name_or_is_the_first_one() -> None:
    listed = b'{"data": [{"id": "a"}, {"id": "b", "max_model_len": 99}]}'
    with canned_server(lambda _: whole(listed)) as url:
        async with client_of(url) as client:
            assert (await client.find_model(None)).id == "a"
            assert (await client.find_model("b")).max_model_len == 99
            assert (await client.find_model("c")).id == "c"


@pytest.mark.parametrize(
    "response",
    [
        whole(b'{"data": []}'),
        whole(b'{"data": [{"id": "a\\u001bb"}]}'),
        whole(b"[]"),
        whole(b"{}", status="404 Not Found"),
        whole(MODELS[:-5]),
    ],
)
async def test_a_server_without_models(response: bytes) -> None:
    with canned_server(lambda _: response) as url:
        async with client_of(url) as client:
            with pytest.raises(ServerError):
                await client.find_model(None)


async def test_a_whole_answer_without_choices() -> None:
    with canned_server(answering(whole(b'{"choices": []}'))) as url:
        async with client_of(url) as client:
            with pytest.raises(BrokenAnswerError, match="no choices"):
                await client.ask(BODY, Answer())
