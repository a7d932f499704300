"""What every answer tells of the prefix cache: the header `x-foreword-cache` and details of the usage."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import pytest

from frontend.cache_header import CACHE_HEADER
from frontend.prompt.tokenizer import ModelTokenizer
from ipc.vocabulary import CacheReport, EngineRequest, MissReason, RequestOutput
from tests.frontend.live_app import live_app
from tests.frontend.scripted_engine import ScriptedEngine, says

Outcome = tuple[int, MissReason, tuple[int, ...]]


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(says([]))


@pytest.fixture(scope="module")
def http(engine: ScriptedEngine, chat_tokenizer: ModelTokenizer) -> Iterator[httpx.Client]:
    with live_app(engine, chat_tokenizer) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


def caching(engine: ScriptedEngine, *outcomes: Outcome) -> None:
    """`outcomes[i]` is what the cache does for prompt `i`: tokens found, why no more, tokens kept."""

    async def script(request: EngineRequest) -> AsyncGenerator[RequestOutput]:
        num_cached_tokens, reason, kept = outcomes[int(request.request_id.rpartition("-")[2])]
        for index in range(request.sampling_params.n):
            report = None if index else CacheReport(reason, kept)
            yield RequestOutput(request.request_id, [70], num_cached_tokens, index=index, cache=report)
            yield RequestOutput(request.request_id, [71], num_cached_tokens, "length", index=index)

    engine.script = script


def complete(http: httpx.Client, prompt: Any, **fields: Any) -> httpx.Response:
    return http.post("/v1/completions", json={"prompt": prompt, **fields}).raise_for_status()


def details(answer: httpx.Response) -> dict[str, Any]:
    return answer.json()["usage"]["prompt_tokens_details"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("outcome", "header"),
    [
        ((0, "not_found", ()), "miss; tokens=0; prompt=8; reason=not_found"),
        ((4, "diverged", ()), "hit; tokens=4; prompt=8; reason=diverged"),
        ((7, "none", ()), "hit; tokens=7; prompt=8"),
        ((4, "evicted", (6,)), "hit; tokens=4; prompt=8; reason=evicted; kept=6; kept-wanted=8"),
        ((0, "read_disabled", (0,)), "miss; tokens=0; prompt=8; reason=read_disabled; kept=0; kept-wanted=8"),
    ],
)
def test_the_header_goes_out_with_the_first_token(
    engine: ScriptedEngine, http: httpx.Client, outcome: Outcome, header: str, stream: bool, n: int
) -> None:
    caching(engine, outcome)
    options = {"cache": {"ttl_s": 60}} if outcome[2] else {}
    answer = complete(http, [5] * 8, stream=stream, n=n, **options)
    assert answer.headers[CACHE_HEADER] == header
    chat = {"messages": [{"role": "user", "content": "hi"}], "stream": stream, "n": n, **options}
    of_chat = http.post("/v1/chat/completions", json=chat).raise_for_status().headers[CACHE_HEADER]
    num_tokens = len(engine.requests[-1].prompt_token_ids)
    assert of_chat == header.replace("prompt=8", f"prompt={num_tokens}").replace(
        "kept-wanted=8", f"kept-wanted={num_tokens}"
    )


def test_the_usage_tells_why_and_how_much_is_kept(engine: ScriptedEngine, http: httpx.Client) -> None:
    caching(engine, (4, "diverged", (6,)))
    assert details(complete(http, [5] * 8, cache={"ttl_s": 60})) == {
        "cached_tokens": 4,
        "image_tokens": 0,
        "cache_miss_reason": "diverged",
        "kept_tokens": 6,
    }
    caching(engine, (7, "none", ()))
    assert details(complete(http, [5] * 8)) == {"cached_tokens": 7, "image_tokens": 0, "cache_miss_reason": None}


def test_several_prompts_are_summed_and_the_first_miss_says_why(engine: ScriptedEngine, http: httpx.Client) -> None:
    caching(engine, (7, "none", (8,)), (4, "evicted", (2,)), (0, "not_found", (0,)))
    answer = complete(http, [[5] * 8, [6] * 10, [7] * 12], cache={"ttl_s": 60})
    assert answer.headers[CACHE_HEADER] == "hit; tokens=11; prompt=30; reason=evicted; kept=10; kept-wanted=30"
    assert details(answer)["cache_miss_reason"] == "evicted"
    assert details(answer)["kept_tokens"] == 10


def test_a_stream_of_several_prompts_tells_of_those_that_have_a_token(
    engine: ScriptedEngine, http: httpx.Client
) -> None:
    """The header cannot wait for the others; the usage at the end has them all."""
    caching(engine, (7, "none", ()), (4, "evicted", ()))
    answer = complete(http, [[5] * 8, [6] * 10], stream=True, stream_options={"include_usage": True})
    assert answer.headers[CACHE_HEADER] in {"hit; tokens=7; prompt=8", "hit; tokens=4; prompt=10; reason=evicted"}
    *_, usage, _, _ = answer.text.split("\n\n")
    assert '"cached_tokens":11' in usage
    assert '"cache_miss_reason":"evicted"' in usage


def test_an_engine_that_tells_nothing_is_not_guessed_at(engine: ScriptedEngine, http: httpx.Client) -> None:
    engine.script = says([70, 71], finish_reason="length", num_cached_tokens=3)
    answer = complete(http, [5] * 8, cache={"ttl_s": 60})
    assert answer.headers[CACHE_HEADER] == "hit; tokens=3; prompt=8"
    assert details(answer) == {"cached_tokens": 3, "image_tokens": 0}


def test_tenants_are_told_what_they_are_called_in_the_metrics(engine: ScriptedEngine, http: httpx.Client) -> None:
    engine.script = says([70, 71], finish_reason="length", num_cached_tokens=3)
    header = complete(http, [5] * 8, cache_salt="pepper").headers[CACHE_HEADER]
    *_, tenant = header.split("; ")
    assert "pepper" not in header
    label = tenant.removeprefix("tenant=")
    assert f'foreword:tenant_prompt_tokens_total{{model_name="tiny",tenant="{label}"}} 8.0' in http.get("/metrics").text
    assert complete(http, [5] * 8, cache_salt="pepper").headers[CACHE_HEADER] == header
    assert complete(http, [5] * 8, cache_salt="salt").headers[CACHE_HEADER] != header
    assert "tenant=" not in complete(http, [5] * 8).headers[CACHE_HEADER]
