"""Engines and frontends as separate processes: shared, lost, drained, overloaded, and kept from strangers."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from engine_core import EngineConfig
from frontend.http_config import EngineAddress, HttpConfig
from ipc.key_files import write_key_set
from tests.http_peers import answering_http_process
from tests.tiny_models import make_tiny_chat_model
from tests.wire_peers import ROOT, free_tcp_endpoint, private_endpoint, wait_until

START_TIMEOUT_S = 60.0


class FakeEngine:
    """A process of `tests.fake_engine`, seen through its log."""

    def __init__(self, endpoint: str, *options: str) -> None:
        self.endpoint = endpoint
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the engine
        argv = [sys.executable, "-m", "tests.fake_engine", endpoint, *options]
        self.process = subprocess.Popen(argv, cwd=ROOT, stderr=self._log, stdin=subprocess.DEVNULL)
        wait_until(lambda: "engine_ready" in self.log, START_TIMEOUT_S)

    @property
    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def drain(self) -> None:
        """SIGTERM; everything it has must end well."""
        self.process.terminate()
        assert self.process.wait(30) == 0
        assert "engine_drained cut_short=0" in self.log

    def clean_up(self) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()


@pytest.fixture(scope="module")
def chat_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_chat_model(tmp_path_factory.mktemp("models") / "tiny-chat")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def key_dir(tmp_path: Path) -> Path:
    write_key_set(tmp_path / "keys")
    return tmp_path / "keys"


def fake_engine(stack: ExitStack, endpoint: str, *options: str) -> FakeEngine:
    engine = FakeEngine(endpoint, *options)
    stack.callback(engine.clean_up)
    return engine


def secured(key_dir: Path) -> tuple[str, ...]:
    return ("--curve-key", str(key_dir / "engine.key"), "--curve-authorized", str(key_dir / "client.pub"))


def frontend_of(*endpoints: str, model_dir: Path, key_dir: Path | None = None, **settings: Any) -> HttpConfig:
    key_file = None if key_dir is None else str(key_dir / "engine.pub")
    return HttpConfig(
        engines=tuple(EngineAddress(endpoint, key_file) for endpoint in endpoints),
        curve_key_file=None if key_dir is None else str(key_dir / "client.key"),
        model_dir=str(model_dir),
        model_names=("fake",),
        **settings,
    )


@asynccontextmanager
async def client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=None)) as http:
        yield http


def completion(max_tokens: int, prompt: list[int] | None = None, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt or [5], "max_tokens": max_tokens, "ignore_eos": True, **fields}


async def wait_for(http: httpx.AsyncClient, *statuses: str, num_requests: int = 0) -> dict[str, Any]:
    """`/health` once its engines have these statuses, and the frontend so many requests."""
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            health = (await http.get("/health")).json()
            found = [engine["status"] for engine in health["engines"]]
            if found == list(statuses) and health["num_requests"] >= num_requests:
                return health
            await asyncio.sleep(0.05)


async def test_two_frontends_share_two_engines_and_one_is_killed(
    stack: ExitStack,
    key_dir: Path,
    chat_model_dir: Path,
) -> None:
    endpoints = [free_tcp_endpoint() for _ in range(2)]
    killed, other = (
        fake_engine(stack, endpoint, "--step-s", "0.01", "--drain-timeout-s", "30", *secured(key_dir))
        for endpoint in endpoints
    )
    config = frontend_of(*endpoints, model_dir=chat_model_dir, key_dir=key_dir)
    urls = [stack.enter_context(answering_http_process(config)) for _ in range(2)]
    async with client(urls[0]) as first, client(urls[1]) as second:
        for http in (first, second):
            await wait_for(http, "ready", "ready")

        async def ask(http: httpx.AsyncClient, n: int) -> httpx.Response:
            return await http.post("/v1/completions", json=completion(100, [n + 1]))

        asked = [asyncio.create_task(ask(http, n)) for n in range(20) for http in (first, second)]
        for http in (first, second):
            health = await wait_for(http, "ready", "ready", num_requests=20)
            assert all(engine["num_requests"] > 0 for engine in health["engines"])
        killed.process.kill()
        answers = await asyncio.gather(*asked)
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) == {200, 503} and 5 <= statuses.count(503) <= 35
        for answer in answers:
            if answer.is_success:
                assert answer.json()["usage"]["completion_tokens"] == 100
            else:
                assert answer.json()["error"]["code"] == "engine_unavailable"
        # The others go on, and what is new finds the other engine.
        for http in (first, second):
            health = await wait_for(http, "down", "ready")
            assert health["status"] == "ready" and health["engines"][0]["reason"] == "the engine closed the connection"
            assert (await ask(http, 7)).is_success
        again = fake_engine(stack, endpoints[0], *secured(key_dir))
        await wait_for(first, "ready", "ready")
    other.drain()
    again.drain()


async def test_a_running_stream_is_finished_by_a_draining_engine(
    stack: ExitStack,
    tmp_path: Path,
    chat_model_dir: Path,
) -> None:
    engine = fake_engine(stack, private_endpoint(tmp_path), "--step-s", "0.02", "--drain-timeout-s", "30")
    url = stack.enter_context(answering_http_process(frontend_of(engine.endpoint, model_dir=chat_model_dir)))
    async with client(url) as http:
        await wait_for(http, "ready")
        options = {"stream": True, "stream_options": {"include_usage": True}}
        async with http.stream("POST", "/v1/completions", json=completion(100, **options)) as streamed:
            events = streamed.aiter_lines()
            await anext(events)
            engine.process.terminate()
            health = await wait_for(http, "draining")
            assert (health["status"], health["reason"]) == ("draining", "the engine is about to stop")
            refused = await http.post("/v1/completions", json=completion(5))
            assert refused.status_code == 503 and refused.headers["retry-after"]
            assert "about to stop" in refused.json()["error"]["message"]
            *_, usage, done = [line async for line in events if line]
        assert done == "data: [DONE]"
        assert msgspec.json.decode(usage.removeprefix("data: "))["usage"]["completion_tokens"] == 100
        assert engine.process.wait(30) == 0
        assert "engine_drained cut_short=0" in engine.log


async def test_too_many_requests_are_told_when_to_come_again(
    stack: ExitStack,
    tmp_path: Path,
    chat_model_dir: Path,
) -> None:
    limits = EngineConfig(max_num_seqs=1, max_num_queued_requests=1)
    options = ("--step-s", "0.02", "--config", msgspec.json.encode(limits).decode(), "--drain-timeout-s", "30")
    engine = fake_engine(stack, private_endpoint(tmp_path), *options)
    url = stack.enter_context(answering_http_process(frontend_of(engine.endpoint, model_dir=chat_model_dir)))
    async with client(url) as http:
        await wait_for(http, "ready")
        asked = [asyncio.create_task(http.post("/v1/completions", json=completion(50))) for _ in range(10)]
        answers = await asyncio.gather(*asked)
        statuses = [answer.status_code for answer in answers]
        assert (statuses.count(200), statuses.count(503)) == (2, 8)
        for answer in answers:
            if not answer.is_success:
                assert int(answer.headers["retry-after"]) >= 1
                error = answer.json()["error"]
                assert error["code"] == "overloaded" and "max_num_queued_requests" in error["message"]
        metrics = (await http.get("/metrics")).text
        assert re.search(r"^foreword:admission_rejections_total{.*max_num_queued_reqs.*} 8\.0$", metrics, re.MULTILINE)
        assert (await http.post("/v1/completions", json=completion(5))).is_success
    engine.drain()


async def test_a_frontend_with_wrong_keys_says_so_and_serves_nobody(
    stack: ExitStack,
    key_dir: Path,
    tmp_path: Path,
    chat_model_dir: Path,
) -> None:
    engine = fake_engine(stack, free_tcp_endpoint(), *secured(key_dir))
    write_key_set(tmp_path / "strange")
    config = frontend_of(engine.endpoint, model_dir=chat_model_dir, key_dir=key_dir)
    config = msgspec.structs.replace(config, curve_key_file=str(tmp_path / "strange" / "client.key"))
    url = stack.enter_context(answering_http_process(config))
    async with client(url) as http:
        health = await wait_for(http, "down")
        assert health["reason"].startswith("not authorised: ")
        refused = await http.post("/v1/completions", json=completion(5))
        assert refused.status_code == 503 and "not authorised" in refused.json()["error"]["message"]
    assert "message_dropped receiver=engine reason=not_authorized" in engine.log


async def test_an_engine_of_another_model_is_kept_out(
    stack: ExitStack,
    tmp_path: Path,
    chat_model_dir: Path,
) -> None:
    directory = private_endpoint(tmp_path)
    other = fake_engine(stack, f"{directory}0", "--name", "other")
    right = fake_engine(stack, f"{directory}1")
    config = frontend_of(other.endpoint, right.endpoint, model_dir=chat_model_dir, engine_model_names=("fake",))
    async with client(stack.enter_context(answering_http_process(config))) as http:
        health = await wait_for(http, "down", "ready")
        assert health["engines"][0]["reason"].endswith("it serves the model 'other', not 'fake'")
        assert (await http.post("/v1/completions", json=completion(5))).is_success


@contextmanager
def foreword(*arguments: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command of ours that runs until it is told to stop, and then does so in order."""
    code = "from frontend.cli import main; main()"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments], stdout=file, stderr=subprocess.STDOUT, cwd=ROOT
        )
    try:
        yield process
        process.terminate()
        assert process.wait(30) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def commands_of_the_document() -> dict[str, list[str]]:
    """The `foreword …` commands of docs/deployment.md by name, each as its words; of several, the one with keys."""
    text = (ROOT / "docs" / "deployment.md").read_text().replace("\\\n", " ")
    lines = re.findall(r"^foreword (.+)$", text, re.MULTILINE)
    return {line.split()[0]: line.split() for line in lines if "keys" in line}


def test_the_document_says_how_it_is_done(tmp_path: Path, chat_model_dir: Path) -> None:
    """Its commands for several machines, with other places and a small model."""
    endpoint = free_tcp_endpoint()
    places = {"MODEL": str(chat_model_dir), "tcp://0.0.0.0:5555": endpoint, "tcp://10.0.0.5:5555": endpoint}

    def placed(word: str) -> str:
        return places.get(word) or re.sub("^keys", str(tmp_path / "keys"), word)

    commands = commands_of_the_document()
    assert set(commands) == {"keys", "engine", "serve"}
    keys, engine, serve = ([name, *map(placed, words)] for name, *words in commands.values())
    with foreword(*keys, log=tmp_path / "keys.log") as making:
        assert making.wait(60) == 0
    engine += ["--num-blocks", "64", "--num-threads", "1"]
    logs = {name: tmp_path / f"{name}.log" for name in ("engine", "serve")}
    with foreword(*engine, log=logs["engine"]), foreword(*serve, "--port", "0", log=logs["serve"]):
        wait_until(lambda: "curl http" in logs["serve"].read_text(), START_TIMEOUT_S)
        url = re.search(r"curl (http://[^/]+)/", logs["serve"].read_text())
        assert url is not None

        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        assert httpx.post(f"{url[1]}/v1/chat/completions", json=chat, timeout=60).is_success
