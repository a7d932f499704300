"""Whatever is wrong with a picture: a 400 that names its part, in bounded time, and nobody else notices."""

from __future__ import annotations

import asyncio
import base64
import socket
import struct
import threading
import zlib
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from frontend.picture_config import PictureConfig
from frontend.prompt.tokenizer import ModelTokenizer
from ipc.vocabulary import EngineRequest, RequestOutput
from tests.frontend.live_app import live_app
from tests.frontend.picture_app import data_url, encoded, image, model_directory, picture_app, user
from tests.frontend.scripted_engine import ScriptedEngine

CHAT = "/v1/chat/completions"
MAX_IMAGES = 4
RED = encoded("red")
JPEG = encoded("red", (64, 64), "JPEG")
# The words of a long answer, one by one: somebody else's stream.
WORDS = 40


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, data: bytes, *, depth: int = 1) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def gif(num_frames: int) -> bytes:
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00"
    return b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff" + frame * num_frames + b"\x3b"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_directory("llava", tmp_path_factory.mktemp("models") / "llava")


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    async def slowly(request: EngineRequest) -> AsyncGenerator[RequestOutput]:
        for number in range(WORDS):
            await asyncio.sleep(0.01)
            yield RequestOutput(request.request_id, [300], finish_reason="length" if number == WORDS - 1 else None)

    return ScriptedEngine(slowly)


@contextmanager
def client(engine: ScriptedEngine, model_dir: Path, **settings: Any) -> Iterator[httpx.Client]:
    config = PictureConfig(max_images_per_prompt=MAX_IMAGES, max_image_bytes=1 << 20, **settings)
    with picture_app(engine, model_dir, config) as (url, _), httpx.Client(base_url=url, timeout=60) as http:
        yield http


@pytest.fixture(scope="module")
def http(engine: ScriptedEngine, model_dir: Path) -> Iterator[httpx.Client]:
    """Of a server that fetches nothing."""
    with client(engine, model_dir) as http:
        yield http


@pytest.fixture(scope="module")
def fetching(
    engine: ScriptedEngine, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """Of a server that fetches from everywhere it may."""
    directory = tmp_path_factory.mktemp("allowed")
    (directory / "red.png").write_bytes(RED)
    (directory / "link.png").symlink_to("/etc/passwd")
    with client(
        engine, model_dir, allow_any_public_media_host=True, allowed_local_media_path=str(directory), media_timeout_s=5
    ) as http:
        http.directory = directory  # type: ignore[attr-defined]
        yield http


def refusal(http: httpx.Client, *parts: Any, **fields: Any) -> dict[str, Any]:
    response = http.post(CHAT, json={"messages": [user(*parts)], **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error  # type: ignore[no-any-return]


def part(image_url: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": image_url, **fields}


BROKEN: dict[str, tuple[str, str]] = {
    "truncated": (data_url(JPEG[: len(JPEG) // 2], "image/jpeg"), "broken"),
    "no bytes": (data_url(b""), "empty"),
    "html": (data_url(b"<!doctype html><html><body>404</body></html>"), "not an image"),
    "an svg": (data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"), "not an image"),
    "bomb": (data_url(png(50_000, 50_000, zlib.compress(bytes(1000)))), "2500000000"),
    "frames": (data_url(gif(10_000), "image/gif"), "1000"),
    "padding": ("data:image/png;base64," + base64.b64encode(b"x" * 10).decode().rstrip("="), "base64"),
    "not base64": ("data:image/png;base64,*****", "base64"),
    "no comma": ("data:image/png;base64", "data"),
    "too large": (data_url(bytes((1 << 20) + 1)), str(1 << 20)),
    "no url": ("cat.png", "not a URL"),
    "empty": ("", "not a URL"),
    "ftp": ("ftp://example.org/cat.png", "'ftp'"),
    "javascript": ("javascript:alert(1)", "'javascript'"),
    "http": ("http://example.org/cat.png", "loads nothing from other hosts"),
    "https": ("https://example.org/cat.png", "loads nothing from other hosts"),
    "a file": ("file:///etc/passwd", ""),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_picture(http: httpx.Client, name: str) -> None:
    url, said = BROKEN[name]
    error = refusal(http, "see ", image(RED), image(url))
    assert error["param"] == "messages[0].content[2]"
    assert error["message"].startswith("messages[0].content[2]: ")
    assert said in error["message"]
    assert len(error["message"]) < 500


SHAPES: list[tuple[Any, str, str]] = [
    (part({"url": 7}), "messages[0].content[0].image_url.url", "got `int`"),
    (part({}), "messages[0].content[0].image_url.url", "missing"),
    (part({"url": "data:,", "detail": "huge"}), "messages[0].content[0].image_url.detail", "'auto', 'high', 'low'"),
    (part({"url": "data:,", "size": 3}), "messages[0].content[0].image_url.size", "unrecognized"),
    (part("data:,", alt="a cat"), "messages[0].content[0].alt", "unrecognized"),
    (part([]), "messages[0].content[0].image_url", "got `array`"),
    (part(None), "messages[0].content[0].image_url", "without the uuid"),
    (part("data:,", uuid=""), "messages[0].content[0].uuid", "1 to 256"),
    (part("data:,", uuid="x" * 257), "messages[0].content[0].uuid", "257"),
    (part(None, uuid="never seen"), "messages[0].content[0]", "send it again"),
    ({"type": "image_url"}, "messages[0].content[0].image_url", "missing"),
    ({"type": "video_url", "video_url": {"url": "data:,"}}, "messages[0].content[0]", "not supported by this model"),
    ({"type": "input_audio", "input_audio": {}}, "messages[0].content[0]", "not supported by this model"),
]


@pytest.mark.parametrize(("content", "param", "said"), SHAPES, ids=[f"{i}-{p}" for i, (_, p, _) in enumerate(SHAPES)])
def test_parts_of_another_shape(http: httpx.Client, content: Any, param: str, said: str) -> None:
    error = refusal(http, content)
    assert error["param"] == param
    assert said in error["message"]


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"crop_size": {"height": 10**6, "width": 10**6}}, "crop_size"),
        ({"return_tensors": "pt"}, "return_tensors"),
        ({"colour": "blue"}, "colour"),
        ({"do_pad": "yes"}, "do_pad"),
        ([1], "must hold a JSON object"),
        ({"x": "y" * 20_000}, "20008 bytes; at most 16384"),
    ],
)
def test_settings_that_the_processor_does_not_take(http: httpx.Client, kwargs: Any, said: str) -> None:
    for parts in ([image(RED)], ["no picture at all"]):
        error = refusal(http, *parts, mm_processor_kwargs=kwargs)
        assert error["param"] == "mm_processor_kwargs"
        assert said in error["message"]


def test_too_many_pictures(http: httpx.Client) -> None:
    parts = [image(RED)] * (MAX_IMAGES + 1)
    error = refusal(http, *parts)
    assert error["param"] == f"messages[0].content[{MAX_IMAGES}]"
    assert f"{MAX_IMAGES + 1} pictures; at most {MAX_IMAGES}" in error["message"]
    assert http.post(CHAT, json={"messages": [user(*parts[:-1])]}).status_code == 200


def test_a_flood_of_pictures_is_refused_before_any_is_looked_at(http: httpx.Client) -> None:
    """Nor is each of them tried in the chat template, to find which it does not show."""
    hidden = {"role": "assistant", "content": [image("http://example.org/")] * 20_000}
    response = http.post(CHAT, json={"messages": [user("hi"), hidden]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == f"messages[1].content[{MAX_IMAGES}]"


def test_a_prompt_that_pictures_make_too_long(http: httpx.Client) -> None:
    error = refusal(http, "word " * 70, *[image(RED)] * MAX_IMAGES, "word " * 70)
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


def test_a_model_without_pictures(engine: ScriptedEngine, chat_tokenizer: ModelTokenizer) -> None:
    with live_app(engine, chat_tokenizer) as url, httpx.Client(base_url=url, timeout=60) as http:
        error = refusal(http, "see ", image(RED))
        assert (error["param"], error["code"]) == ("messages[0].content[1]", "unsupported_content")
        error = refusal(http, "see", mm_processor_kwargs={"max_pixels": 1})
        assert error["param"] == "mm_processor_kwargs"
        assert "takes no pictures" in error["message"]


@pytest.fixture
def private_server() -> Iterator[tuple[int, list[Any]]]:
    """A port of this machine, and who connected to it."""
    visitors: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    visitors.append(listener.accept())
                except OSError:
                    return

        thread = threading.Thread(target=accept)
        thread.start()
        yield listener.getsockname()[1], visitors
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


PRIVATE = [
    "http://127.0.0.1:{port}/",
    "http://localhost:{port}/",
    "http://localhost.:{port}/",
    "http://[::1]:{port}/",
    "http://[::ffff:127.0.0.1]:{port}/",
    "http://0x7f000001:{port}/",
    "http://2130706433:{port}/",
    "http://127.1:{port}/",
    "http://0.0.0.0:{port}/",
    "http://user@127.0.0.1:{port}/",
    "https://127.0.0.1:{port}/",
    "http://169.254.169.254/latest/meta-data",
    "http://10.0.0.1/",
    "http://192.168.0.1/",
    "http://[fd00:ec2::254]/latest",
    "file:///etc/passwd",
    "file://localhost/etc/passwd",
    "file:///{directory}/../../../../etc/passwd",
    "file:///{directory}/link.png",
    "file:///{directory}",
]


@pytest.mark.parametrize("url", PRIVATE)
def test_private_places_are_not_looked_at(
    fetching: httpx.Client, private_server: tuple[int, list[Any]], url: str
) -> None:
    port, visitors = private_server
    directory: Path = fetching.directory  # type: ignore[attr-defined]
    error = refusal(fetching, image(url.format(port=port, directory=str(directory).lstrip("/"))))
    assert error["param"] == "messages[0].content[0]"
    assert "root:" not in error["message"]
    assert not visitors


def test_an_allowed_directory_is_read(fetching: httpx.Client) -> None:
    directory: Path = fetching.directory  # type: ignore[attr-defined]
    response = fetching.post(CHAT, json={"messages": [user(image(f"file://{directory}/red.png"))]})
    assert response.status_code == 200, response.text


async def test_other_streams_go_on(http: httpx.Client) -> None:
    body = {"messages": [user("hello ", image(RED))], "stream": True}
    async with httpx.AsyncClient(base_url=http.base_url, timeout=60) as client:

        async def stream() -> int:
            response = await client.post(CHAT, json=body)
            return response.text.count("data: ")

        async def refused(url: str) -> int:
            return (await client.post(CHAT, json={"messages": [user(image(url))]})).status_code

        streams = [asyncio.create_task(stream()) for _ in range(3)]
        statuses = await asyncio.gather(*(refused(url) for url, _ in BROKEN.values()))
        assert set(statuses) == {400}
        # Role and words, the end, and [DONE].
        assert len(set(await asyncio.gather(*streams))) == 1
        assert streams[0].result() >= WORDS
