"""`POST /reset_prefix_cache`: forgotten is forgotten, and nothing is done by halves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.frontend.http_stack import Stack, http_stack
from tests.wire_peers import wait_until

PROMPT = [5] * 40


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, chat_model_dir: Path) -> Iterator[Stack]:
    with http_stack(tmp_path_factory.mktemp("s"), chat_model_dir, "--step-s", "0.01") as stack:
        yield stack


def cached_tokens(stack: Stack) -> int:
    return stack.complete(PROMPT, 1)["usage"]["prompt_tokens_details"]["cached_tokens"]  # type: ignore[no-any-return]


def test_what_was_cached_is_computed_again(stack: Stack) -> None:
    """Two whole blocks; and of each request a third one, which it had begun."""
    cached_tokens(stack)
    assert cached_tokens(stack) == len(PROMPT) - 1
    answer = stack.http.post("/reset_prefix_cache")
    assert (answer.status_code, answer.json()) == (200, {"num_dropped_blocks": 2 + 2})
    assert cached_tokens(stack) == 0
    assert stack.http.post("/reset_prefix_cache").json() == {"num_dropped_blocks": 2 + 1}
    assert stack.http.post("/reset_prefix_cache").json() == {"num_dropped_blocks": 0}


@pytest.mark.parametrize(
    "asked",
    [{"params": {"reset_running_requests": "true"}}, {"json": {"reset_running_requests": True}}],
    ids=["query", "body"],
)
async def test_beside_running_requests_and_preempting_them(stack: Stack, asked: dict) -> None:
    body = {"prompt": PROMPT, "max_tokens": 100, "ignore_eos": True, "temperature": 0}
    undisturbed = stack.complete(PROMPT, 100)["choices"]
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as http:
        running = asyncio.create_task(http.post("/v1/completions", json=body))
        while not stack.scrape()("num_requests_running"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        first = await http.post("/reset_prefix_cache")
        assert first.json()["num_dropped_blocks"] >= 2
        before = stack.scrape()("num_preemptions_total")
        done = await http.post("/reset_prefix_cache", **asked)
        assert done.status_code == 200
        assert (await running).json()["choices"] == undisturbed
    assert stack.scrape()("num_preemptions_total") == before + 1


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"params": {"reset_running_requests": "perhaps"}}, "reset_running_requests"),
        ({"json": {"reset_running_requests": "yes"}}, "reset_running_requests"),
        ({"json": {"reset_external": True}}, "reset_external"),
        ({"content": b"{"}, None),
    ],
)
def test_bad_requests_name_the_field(stack: Stack, asked: dict, param: str | None) -> None:
    answer = stack.http.post("/reset_prefix_cache", **asked)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_without_an_engine_there_is_nothing_to_reset(stack: Stack) -> None:
    stack.kill_engine()
    wait_until(lambda: stack.http.get("/health").status_code == 503)
    answer = stack.http.post("/reset_prefix_cache")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_unavailable"
    assert "retry-after" in answer.headers


def test_the_documentation_knows_it(stack: Stack) -> None:
    document = stack.http.get("/openapi.json").json()
    assert set(document["paths"]["/reset_prefix_cache"]["post"]["responses"]) >= {"200", "400", "401", "503"}
    assert "/metrics" in document["paths"]
