"""With API keys, nobody without one gets further than to see whether the server lives."""

from __future__ import annotations

import http.client
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import openai
import psutil
import pytest

from frontend.api_key import ADMIN_API_KEY_ENV, API_KEY_ENV, api_key_environment, check_api_key, take_api_keys
from frontend.http_config import EngineAddress, HttpConfig, child_argv
from frontend.isolation import IsolationMode
from frontend.prompt.tokenizer import ModelTokenizer
from tests.frontend.live_app import live_app
from tests.frontend.scripted_engine import ScriptedEngine, says
from tests.wire_peers import ROOT, private_endpoint

KEYS = ("sk-first", "sk-second")
GUARDED = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/reset_prefix_cache"),
    ("GET", "/v1/models"),
    ("GET", "/docs/assets/index.html"),
    ("GET", "/nowhere"),
    ("DELETE", "/v1/models"),
    ("GET", "/health/"),
    ("GET", "/metrics/../v1/models"),
    ("GET", "/HEALTH"),
]


@pytest.fixture(scope="module")
def url(chat_tokenizer: ModelTokenizer) -> Iterator[str]:
    ids = chat_tokenizer.backend.encode("fine", add_special_tokens=False).ids
    with live_app(ScriptedEngine(says(ids, finish_reason="length")), chat_tokenizer, api_keys=KEYS) as url:
        yield url


def raw_request(url: str, method: str, path: str, headers: dict[str, str] | None = None) -> http.client.HTTPResponse:
    # httpx would tidy up the path.
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    connection.request(method, path, headers=headers or {})
    return connection.getresponse()


@pytest.mark.parametrize(("method", "path"), GUARDED)
def test_no_key_no_answer(url: str, method: str, path: str) -> None:
    answer = raw_request(url, method, path)
    assert answer.status == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert b'code":"invalid_api_key"' in answer.read()


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", "Bearer sk-firs", "Bearer sk-first2", "Basic sk-first", "sk-first", "Bearer sk-first,x"],
)
def test_a_wrong_key_is_none(url: str, header: str) -> None:
    assert raw_request(url, "GET", "/v1/models", {"authorization": header}).status == 401


@pytest.mark.parametrize("header", ["Bearer sk-first", "bearer sk-second", "BEARER  sk-second "])
def test_each_key_opens_everything(url: str, header: str) -> None:
    assert raw_request(url, "GET", "/v1/models", {"authorization": header}).status == 200
    assert raw_request(url, "GET", "/nowhere", {"authorization": header}).status == 404


def test_a_key_may_come_in_a_header_of_its_own(url: str) -> None:
    def status(**keys: str) -> int:
        headers = {name.replace("_", "-"): key for name, key in keys.items()}
        return raw_request(url, "GET", "/v1/models", headers).status

    assert status(x_api_key="sk-second") == status(X_Api_Key=" sk-first ") == 200
    assert status(x_api_key="sk-first", authorization="Bearer none") == 200
    assert status(x_api_key="none", authorization="Bearer sk-first") == 200
    assert status(x_api_key="") == status(x_api_key="sk-firs") == status(x_api_key="Bearer sk-first") == 401


@pytest.mark.parametrize("path", ["/health", "/version", "/metrics"])
def test_whoever_watches_needs_no_key(url: str, path: str) -> None:
    assert raw_request(url, "GET", path).status == 200


def test_whoever_reads_the_documentation_needs_no_key(url: str) -> None:
    assert (raw_request(url, "GET", "/").status, raw_request(url, "GET", "/openapi.json").status) == (302, 200)
    page = raw_request(url, "GET", "/docs").read().decode()
    parts = re.findall(r'(?:src|href)="(/[^"]+)"', page)
    assert len(parts) == 3
    assert [raw_request(url, "GET", part).status for part in parts] == [200, 200, 200]


def test_the_sdk_understands(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="sk-wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError) as refused:
            stranger.completions.create(model="tiny", prompt="x")
        assert refused.value.code == "invalid_api_key"
        assert "sk-" not in refused.value.message
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEYS[0]) as client:
        assert client.completions.create(model="tiny", prompt="x").choices[0].text == "fine"


def test_a_large_body_without_a_key_is_answered_too(url: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", content=b" " * (8 << 20), timeout=30)
    assert answer.status_code == 401


def test_without_keys_none_is_needed(chat_tokenizer: ModelTokenizer) -> None:
    with live_app(ScriptedEngine(says([])), chat_tokenizer) as url:
        assert raw_request(url, "GET", "/v1/models").status == 200
        assert raw_request(url, "GET", "/v1/models", {"authorization": "Bearer any"}).status == 200


ADMIN = "sk-admin"


@pytest.mark.parametrize(
    ("isolation", "keys", "admin_keys", "may_reset"),
    [
        ("salt", (), (), {None, "any", *KEYS, ADMIN}),
        ("salt", KEYS, (), set(KEYS)),
        ("api-key", KEYS, (), set()),
        ("api-key", KEYS, (ADMIN,), {ADMIN}),
        ("none", KEYS, (ADMIN, KEYS[1]), {ADMIN, KEYS[1]}),
        ("salt", (), (ADMIN,), {ADMIN}),
    ],
)
def test_who_may_reset_the_cache_of_all(
    chat_tokenizer: ModelTokenizer,
    isolation: IsolationMode,
    keys: tuple[str, ...],
    admin_keys: tuple[str, ...],
    may_reset: set[str | None],
) -> None:
    """Clients that are kept apart by their keys could stop each other with it: requests that run begin anew."""
    settings = {"isolation": isolation, "api_keys": keys, "admin_api_keys": admin_keys}
    with live_app(ScriptedEngine(says([])), chat_tokenizer, **settings) as url:
        for key in (None, "any", *KEYS, ADMIN):
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            answer = httpx.post(f"{url}/reset_prefix_cache", headers=headers)
            is_known = not keys or key in {*keys, *admin_keys}
            assert answer.status_code == (200 if key in may_reset else 403 if is_known else 401), key
            if answer.status_code == 403:
                assert answer.json()["error"]["code"] == "admin_api_key_needed"
                assert ADMIN_API_KEY_ENV in answer.json()["error"]["message"]
            # Whatever else there is, an admin key opens as any other does.
            assert httpx.get(f"{url}/v1/models", headers=headers).status_code == (200 if is_known else 401)


def test_an_admin_is_a_caller_of_its_own(chat_tokenizer: ModelTokenizer) -> None:
    engine = ScriptedEngine(says([70], finish_reason="length"))
    settings = {"isolation": "api-key", "api_keys": KEYS, "admin_api_keys": (ADMIN,)}
    with live_app(engine, chat_tokenizer, **settings) as url:
        for key in (*KEYS, ADMIN):
            headers = {"authorization": f"Bearer {key}"}
            httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, headers=headers).raise_for_status()
    assert len({request.extra_key_spans for request in engine.requests}) == 3


@pytest.mark.parametrize("key", ["", " ", "a b", "a,b", "ä", "a\n"])
def test_what_can_be_no_key(key: str) -> None:
    with pytest.raises(ValueError, match="an API key must not be empty"):
        check_api_key(key)


def test_keys_travel_in_the_environment_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (api_key_environment(KEYS) | api_key_environment((ADMIN,), ADMIN_API_KEY_ENV)).items():
        monkeypatch.setenv(name, value)
    assert take_api_keys() == KEYS
    assert take_api_keys(ADMIN_API_KEY_ENV) == (ADMIN,)
    assert not {API_KEY_ENV, ADMIN_API_KEY_ENV} & os.environ.keys()
    assert take_api_keys() == ()
    assert api_key_environment(()) == {}


def test_a_supervisor_hands_keys_to_the_http_process_only_and_never_shows_them(
    tmp_path: Path, chat_model_dir: Path
) -> None:
    config = HttpConfig(
        engines=(EngineAddress(private_endpoint(tmp_path)),),
        model_dir=str(chat_model_dir),
        model_names=("tiny",),
        port=0,
    )
    code = f"""
import sys
from frontend.api_key import api_key_environment, take_api_keys
from frontend.launch import ChildSpec, supervise
from ipc.logs import configure_logging
configure_logging("serve")
idle = [sys.executable, "-c", "import sys; sys.stdin.read()"]
children = [
    ChildSpec("other", idle),
    ChildSpec("http", {child_argv(config)!r}, environment=api_key_environment(take_api_keys())),
]
print(children)
supervise(children)
"""
    environment = os.environ | api_key_environment(["sk-very-secret"]) | {"FOREWORD_LOG_LEVEL": "debug"}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        try:
            port = _wait_for_port(process)
            assert httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 401
            allowed = httpx.get(
                f"http://127.0.0.1:{port}/v1/models", headers={"authorization": "Bearer sk-very-secret"}
            )
            assert allowed.status_code == 200
            for child in psutil.Process(process.pid).children():
                assert "sk-very-secret" not in " ".join(child.cmdline())
                assert (API_KEY_ENV in child.environ()) == ("frontend.http_process" in child.cmdline())
        finally:
            process.terminate()
            said, _ = process.communicate(timeout=30)
    assert "child_started" in said
    assert "sk-very-secret" not in said


def _wait_for_port(process: subprocess.Popen[str]) -> int:
    def listening() -> list[int]:
        return [
            connection.laddr.port
            for child in psutil.Process(process.pid).children()
            for connection in child.net_connections("tcp4")
            if connection.status == psutil.CONN_LISTEN
        ]

    for _ in range(3000):
        for port in listening():
            try:
                httpx.get(f"http://127.0.0.1:{port}/version").raise_for_status()
            except httpx.TransportError:
                continue
            return port
        assert process.poll() is None
    raise AssertionError("the HTTP process does not listen")
