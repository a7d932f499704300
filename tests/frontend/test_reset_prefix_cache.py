"""`POST /reset_prefix_cache`: forgotten is forgotten, and what is not is told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from litestar import Litestar

from frontend.cache_routes import cache_routes
from ipc.stats import PrefixCacheReset
from tests.frontend.http_stack import Stack, http_stack
from tests.frontend.scripted_engine import ScriptedEngine, says
from tests.wire_peers import wait_until

PROMPT = [5] * 40
# Two seconds, in which whatever is asked meanwhile is answered.
NUM_RUNNING_TOKENS = 200


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, chat_model_dir: Path) -> Iterator[Stack]:
    with http_stack(tmp_path_factory.mktemp("s"), chat_model_dir, "--step-s", "0.01") as stack:
        yield stack


def cached_tokens(stack: Stack) -> int:
    return stack.complete(PROMPT, 1)["usage"]["prompt_tokens_details"]["cached_tokens"]  # type: ignore[no-any-return]


def reset(stack: Stack) -> dict[str, Any]:
    """The one engine's tier `device`."""
    answer = stack.http.post("/reset_prefix_cache").raise_for_status().json()
    (engine,) = answer["engines"]
    assert (engine["engine"], engine["why_not"]) == (0, None)
    assert engine["tiers"]["encoder"] == {"dropped": 0, "kept": 0, "why_kept": None}
    assert answer["num_dropped_blocks"] == engine["tiers"]["device"]["dropped"]
    return engine["tiers"]["device"]  # type: ignore[no-any-return]


def test_what_was_cached_is_computed_again(stack: Stack) -> None:
    """Two whole blocks; and of each request a third one, which it had begun."""
    cached_tokens(stack)
    assert cached_tokens(stack) == len(PROMPT) - 1
    assert reset(stack) == {"dropped": 2 + 2, "kept": 0, "why_kept": None}
    assert cached_tokens(stack) == 0
    assert reset(stack)["dropped"] == 2 + 1
    assert reset(stack)["dropped"] == 0


def test_what_is_kept_for_a_time_is_forgotten_all_the_same(stack: Stack) -> None:
    stack.complete(PROMPT, 1, cache={"ttl_s": 3600})
    assert stack.scrape()("kv_kept_blocks") == 3
    reset(stack)
    assert stack.scrape()("kv_kept_blocks") == 0
    assert cached_tokens(stack) == 0
    reset(stack)


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> list:
    return stack.complete(PROMPT, NUM_RUNNING_TOKENS)["choices"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "asked",
    [{"params": {"reset_running_requests": "true"}}, {"json": {"reset_running_requests": True}}],
    ids=["query", "body"],
)
async def test_requests_that_run_go_on_with_what_nobody_finds_any_more(
    stack: Stack, undisturbed: list, asked: dict
) -> None:
    body = {"prompt": PROMPT, "max_tokens": NUM_RUNNING_TOKENS, "ignore_eos": True, "temperature": 0}
    reset(stack)
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as http:
        running = asyncio.create_task(http.post("/v1/completions", json=body))
        while not stack.scrape()("num_requests_running"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        device = reset(stack)
        assert device["dropped"] >= 2
        assert device["kept"] >= 2
        assert device["why_kept"] == "1 running request computed or found them before; nobody else finds them"
        assert cached_tokens(stack) == 0
        before = stack.scrape()("num_preemptions_total")
        done = await http.post("/reset_prefix_cache", **asked)
        assert done.json()["engines"][0]["tiers"]["device"]["kept"] == 0
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
    assert answer.json()["num_dropped_blocks"] == 0
    (engine,) = answer.json()["engines"]
    assert engine["why_not"] and engine["tiers"] == {}
    assert "retry-after" in answer.headers


def test_of_several_engines_those_that_are_there_forget_and_the_others_are_told() -> None:
    """An engine that is away may have its cache when it comes back: who must be sure looks at the status."""

    async def ask() -> httpx.Response:
        there, away = (ScriptedEngine(says([])) for _ in range(2))
        away.index, away.state, away.down_reason = 1, "down", "the engine was silent for 4.2 s"
        there.reset_result = PrefixCacheReset(7, 3, 2, 1, 1)
        app = Litestar(cache_routes([there, away]))  # type: ignore[list-item]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as http:
            return await http.post("/reset_prefix_cache")

    answer = asyncio.run(ask())
    assert answer.status_code == 503
    body = answer.json()
    assert "1 of 2" in body["error"]["message"] and "silent for 4.2 s" in body["error"]["message"]
    assert body["num_dropped_blocks"] == 7
    there, away = body["engines"]
    assert there["why_not"] is None
    assert (there["tiers"]["device"]["dropped"], there["tiers"]["device"]["kept"]) == (7, 3)
    assert there["tiers"]["device"]["why_kept"].startswith("2 running requests")
    assert (there["tiers"]["encoder"]["dropped"], there["tiers"]["encoder"]["kept"]) == (1, 1)
    assert away == {"engine": 1, "why_not": "the engine was silent for 4.2 s", "tiers": {}}


def test_the_documentation_knows_it(stack: Stack) -> None:
    document = stack.http.get("/openapi.json").json()
    assert set(document["paths"]["/reset_prefix_cache"]["post"]["responses"]) >= {"200", "400", "401", "503"}
    assert "/metrics" in document["paths"]
