"""Whatever is wrong with a request: a 4xx in OpenAI's shape that names the field and says what was expected."""

from __future__ import annotations

import gzip
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from msgspec.structs import replace as replace_fields

from frontend.prompt.tokenizer import ModelTokenizer
from tests.frontend.live_app import live_app
from tests.frontend.scripted_engine import MAX_MODEL_LEN, VOCAB_SIZE, ScriptedEngine, says

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MAX_BODY_BYTES = 2 << 20


@pytest.fixture(scope="module")
def engine(chat_tokenizer: ModelTokenizer) -> ScriptedEngine:
    return ScriptedEngine(
        says(chat_tokenizer.backend.encode("fine", add_special_tokens=False).ids, finish_reason="length")
    )


@pytest.fixture(scope="module")
def http(engine: ScriptedEngine, chat_tokenizer: ModelTokenizer) -> Iterator[httpx.Client]:
    with (
        live_app(engine, chat_tokenizer, max_body_bytes=MAX_BODY_BYTES) as url,
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        yield client


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert body["error"]["message"]
    return body["error"]  # type: ignore[no-any-return]


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"} | fields]}


def chat(**fields: Any) -> dict[str, Any]:
    return message() | fields


def call(arguments: str) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"} | fields}


def cached(*cache_controls: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": "x", "cache_control": control} for control in cache_controls]


EPHEMERAL = {"type": "ephemeral"}


CASES = [
    (CHAT, {}, "messages", "missing"),
    (CHAT, {"messages": []}, "messages", "empty"),
    (CHAT, {"messages": "hi"}, "messages", "array"),
    (CHAT, {"messages": [{"content": "hi"}]}, "messages[0].role", "missing"),
    (CHAT, message(role=7), "messages[0].role", "`str`, got `int`"),
    (CHAT, message(role="pirate"), "messages[0].role", "'pirate' is not one of 'assistant', 'developer', 'function'"),
    (CHAT, message(role="tool"), "messages[0].tool_call_id", "is required"),
    (CHAT, message(role="tool", tool_call_id="call_1"), "messages[0].role", "does not show results"),
    (CHAT, message(role="function", name="f"), "messages[0].role", "not supported yet"),
    (CHAT, message(content=None), "messages[0].content", "null"),
    (CHAT, message(content=5), "messages[0].content", "got `int`"),
    (CHAT, message(content=[{"type": "text"}]), "messages[0].content[0].text", "missing"),
    (CHAT, message(content=[{"type": "smell", "smell": ""}]), "messages[0].content[0].type", "not one of 'text',"),
    (
        CHAT,
        message(content=[{"type": "text", "text": "see:"}, {"type": "image_url", "image_url": {"url": "data:,"}}]),
        "messages[0].content[1]",
        "not supported by this model",
    ),
    (CHAT, message(tool_calls=[{}], role="assistant"), "messages[0].tool_calls[0].id", "missing"),
    (CHAT, message(tool_calls=[call("{}")]), "messages[0].tool_calls", "only assistants"),
    (CHAT, message(tool_call_id="call_1"), "messages[0].tool_call_id", "only allowed"),
    (CHAT, message(role="assistant", tool_calls=[call("{}")]), "messages[0].tool_calls", "does not show calls"),
    (CHAT, message(role="assistant", function_call={"name": "f"}), "messages[0].function_call", "not supported yet"),
    (CHAT, message(mood="good"), "messages[0].mood", "unrecognized"),
    (CHAT, chat(moood=1), "moood", "unrecognized"),
    (CHAT, chat(model=1), "model", "`str"),
    (CHAT, chat(max_tokens=0), "max_tokens", "at least 1, got 0"),
    (CHAT, chat(max_tokens=-5), "max_tokens", "-5"),
    (CHAT, chat(max_tokens=MAX_MODEL_LEN + 1), "max_tokens", str(MAX_MODEL_LEN)),
    (CHAT, chat(max_tokens=10**30), "max_tokens", ""),
    (CHAT, chat(max_tokens="7"), "max_tokens", "got `str`"),
    (CHAT, chat(max_tokens=1.5), "max_tokens", "got `float`"),
    (CHAT, chat(max_completion_tokens=0), "max_completion_tokens", "at least 1, got 0"),
    (CHAT, chat(max_completion_tokens=999), "max_completion_tokens", "999"),
    (CHAT, chat(temperature=-0.1), "temperature", ">= 0"),
    (CHAT, chat(temperature=2.1), "temperature", "<= 2"),
    (CHAT, chat(temperature="hot"), "temperature", "got `str`"),
    (CHAT, chat(top_p=0), "top_p", "> 0"),
    (CHAT, chat(top_p=1.01), "top_p", "<= 1"),
    (CHAT, chat(top_k=-2), "top_k", ">= -1"),
    (CHAT, chat(seed=2**64), "seed", ""),
    (CHAT, chat(stop=["x"] * 17), "stop", "17"),
    (CHAT, chat(stop=""), "stop", "empty"),
    (CHAT, chat(stop=[1]), "stop[0]", "got `int`"),
    (CHAT, chat(stop_token_ids=[VOCAB_SIZE]), "stop_token_ids", str(VOCAB_SIZE)),
    (CHAT, chat(stop_token_ids=[-1]), "stop_token_ids[0]", ">= 0"),
    (CHAT, chat(stream_options={"include_usage": True}), "stream_options", "stream"),
    (CHAT, chat(stream=1), "stream", "`bool"),
    (CHAT, chat(cache_salt=""), "cache_salt", "empty"),
    (CHAT, chat(cache_salt="a/b"), "cache_salt", "/"),
    (CHAT, chat(cache_salt="s" * 129), "cache_salt", "129"),
    (CHAT, chat(cache=True), "cache", "got `bool`"),
    (CHAT, chat(cache={"reed": True}), "cache.reed", "unrecognized"),
    (CHAT, chat(cache={"ttl": "5m"}), "cache.ttl", "unrecognized"),
    (CHAT, chat(cache={"read": "yes"}), "cache.read", "got `str`"),
    (CHAT, chat(cache={"ttl_s": 0}), "cache.ttl_s", "> 0"),
    (CHAT, chat(cache={"ttl_s": -1}), "cache.ttl_s", "> 0"),
    (CHAT, chat(cache={"ttl_s": 86_401}), "cache.ttl_s", "<= 86400"),
    (CHAT, chat(cache={"ttl_s": 10**400}), "cache.ttl_s", ""),
    (CHAT, chat(cache={"ttl_s": 60, "priority": 101}), "cache.priority", "<= 100"),
    (CHAT, chat(cache={"ttl_s": 60, "priority": -1}), "cache.priority", ">= 0"),
    (CHAT, chat(cache={"priority": 5}), "cache.priority", "needs cache.ttl_s"),
    (CHAT, chat(cache={"ttl_s": 60, "write": False}), "cache.ttl_s", "cache.write = false"),
    (
        CHAT,
        chat(cache={"write": False}) | message(content=cached(EPHEMERAL)),
        "messages[0].content[0].cache_control",
        "cache.write = false",
    ),
    (
        CHAT,
        message(content=cached({"type": "ephemeral", "ttl": "2h"})),
        "messages[0].content[0].cache_control.ttl",
        "'2h' is not one of '1h', '5m'",
    ),
    (
        CHAT,
        message(content=cached({"type": "persistent"})),
        "messages[0].content[0].cache_control.type",
        "'persistent' is not one of 'ephemeral'",
    ),
    (
        CHAT,
        message(content=cached(EPHEMERAL | {"scope": "org"})),
        "messages[0].content[0].cache_control.scope",
        "unrecognized",
    ),
    (CHAT, message(content=cached({})), "messages[0].content[0].cache_control.type", "missing"),
    (CHAT, message(content=cached(*[EPHEMERAL] * 5)), "messages[0].content[4].cache_control", "at most 4"),
    (
        CHAT,
        chat(cache={"ttl_s": 60}) | message(content=cached(*[EPHEMERAL] * 4)),
        "cache.ttl_s",
        "5 prefixes are to be kept",
    ),
    (
        CHAT,
        chat(tools=[tool() | {"cache_control": EPHEMERAL}]) | message(content=cached(*[EPHEMERAL] * 4)),
        "messages[0].content[3].cache_control",
        "at most 4",
    ),
    (CHAT, chat(tools=[tool() | {"cache_control": {"type": 1}}]), "tools[0].cache_control.type", "got `int`"),
    (CHAT, chat(n=0), "n", ">= 1"),
    (CHAT, chat(n=129), "n", "<= 128"),
    (CHAT, chat(n=1.5), "n", "got `float`"),
    (CHAT, chat(logprobs=5), "logprobs", "bool"),
    (CHAT, chat(top_logprobs=3), "top_logprobs", "needs logprobs"),
    (CHAT, chat(top_logprobs=3, logprobs=False), "top_logprobs", "needs logprobs"),
    (CHAT, chat(top_logprobs=21, logprobs=True), "top_logprobs", "<= 20"),
    (CHAT, chat(top_logprobs=-1, logprobs=True), "top_logprobs", ">= 0"),
    (CHAT, chat(prompt_logprobs=21), "prompt_logprobs", "<= 20"),
    (CHAT, chat(prompt_logprobs=-1), "prompt_logprobs", ">= 0"),
    (CHAT, chat(prompt_logprobs=0, stream=True), "prompt_logprobs", "not available with stream"),
    (CHAT, chat(echo=True), "echo", "unrecognized"),
    (CHAT, chat(best_of=1), "best_of", "unrecognized"),
    (CHAT, chat(bad_words="word"), "bad_words", "array"),
    (CHAT, chat(bad_words=["fine", ""]), "bad_words[1]", "more than whitespace"),
    (CHAT, chat(bad_words=["x" * 32_769]), "bad_words", "32769 characters; at most 32768"),
    (CHAT, chat(include_stop_str_in_output="yes"), "include_stop_str_in_output", "bool"),
    (CHAT, chat(min_tokens=9, max_completion_tokens=8), "min_tokens", "9, more than max_completion_tokens, which is 8"),
    (
        CHAT,
        chat(stream=True, stream_options={"continuous_usage_stats": 1}),
        "stream_options.continuous_usage_stats",
        "",
    ),
    (CHAT, chat(tools=[{"type": "function"}]), "tools[0].function", "missing"),
    (CHAT, chat(tools=[{"type": "custom"}]), "tools[0].type", "'custom' is not one of 'function'"),
    (CHAT, chat(tools=[tool(name="")]), "tools[0].function.name", "length >= 1"),
    (CHAT, chat(tools=[tool(), tool(returns="x")]), "tools[1].function.returns", "unrecognized"),
    (CHAT, chat(tools=[tool(strict=True)]), "tools[0].function.strict", "not supported yet"),
    (CHAT, chat(tools=[tool()]), "tools", "does not show tools"),
    (CHAT, chat(tool_choice="required"), "tool_choice", "not supported yet"),
    (CHAT, chat(tool_choice={"type": "function", "function": {"name": "f"}}), "tool_choice", "not supported yet"),
    (CHAT, chat(functions=[{"name": "f"}]), "functions", "not supported yet"),
    (CHAT, chat(chat_template_kwargs=[]), "chat_template_kwargs", "must hold a JSON object, got an array"),
    (CHAT, chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs", "must not set 'messages'"),
    (CHAT, chat(add_generation_prompt="no"), "add_generation_prompt", "got `str`"),
    (
        CHAT,
        chat(continue_final_message=True, add_generation_prompt=True),
        "continue_final_message",
        "exclude each other",
    ),
    (CHAT, chat(presence_penalty="0.5"), "presence_penalty", "float"),
    (CHAT, chat(logit_bias={"five": 1}), "logit_bias", "int"),
    (CHAT, chat(allowed_token_ids=[-1]), "allowed_token_ids[0]", ">= 0"),
    (CHAT, chat(response_format={"type": "json_object"}), "response_format", "json_object"),
    (COMPLETION, {}, "prompt", "missing"),
    (COMPLETION, {"prompt": None}, "prompt", "null"),
    (COMPLETION, {"prompt": ""}, "prompt", "0 tokens"),
    (COMPLETION, {"prompt": []}, "prompt", "empty"),
    (COMPLETION, {"prompt": [[]]}, "prompt", "0 tokens"),
    (COMPLETION, {"prompt": ["fine", ""]}, "prompt[1]", "0 tokens"),
    (COMPLETION, {"prompt": [1, "x"]}, "prompt", "mixes"),
    (COMPLETION, {"prompt": [1.5]}, "prompt[0]", "got `float`"),
    (COMPLETION, {"prompt": [0, VOCAB_SIZE]}, "prompt", f"{VOCAB_SIZE} tokens"),
    (COMPLETION, {"prompt": [[1], [VOCAB_SIZE + 5]]}, "prompt[1]", str(VOCAB_SIZE + 5)),
    (COMPLETION, {"prompt": [-1]}, "prompt[0]", ">= 0"),
    (COMPLETION, {"prompt": ["x"] * 1025}, "prompt", "1025"),
    (COMPLETION, {"prompt": "x", "best_of": 2}, "best_of", "best_of is 2 and n is 1"),
    (COMPLETION, {"prompt": "x", "best_of": 3, "n": 2}, "best_of", "best_of is 3 and n is 2"),
    (COMPLETION, {"prompt": "x", "n": 129}, "n", "<= 128"),
    (COMPLETION, {"prompt": ["x"] * 10, "n": 103}, "n", "1030 choices; at most 1024"),
    (COMPLETION, {"prompt": "x", "suffix": "y"}, "suffix", "not supported yet"),
    (COMPLETION, {"prompt": "x", "logprobs": True}, "logprobs", "got `bool`"),
    (COMPLETION, {"prompt": "x", "logprobs": 21}, "logprobs", "<= 20"),
    (COMPLETION, {"prompt": "x", "top_logprobs": 2}, "top_logprobs", "unrecognized"),
    (COMPLETION, {"prompt": "x", "max_tokens": 0}, "max_tokens", "at least 1, got 0"),
    (COMPLETION, {"prompt": "x", "max_tokens": -1, "echo": True}, "max_tokens", "at least 0, got -1"),
    (COMPLETION, {"prompt": "x", "max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens", "1, more than max_tok"),
    (COMPLETION, {"prompt": "x", "messages": []}, "messages", "unrecognized"),
    (COMPLETION, {"prompt": "x", "cache": {"ttl_s": 60, "wriet": False}}, "cache.wriet", "unrecognized"),
    (COMPLETION, {"prompt": "x", "cache": {"priority": 1}}, "cache.priority", "needs cache.ttl_s"),
    (COMPLETION, {"prompt": "x", "cache_control": EPHEMERAL}, "cache_control", "unrecognized"),
]


@pytest.mark.parametrize(("path", "body", "param", "says_what"), CASES, ids=lambda value: str(value)[:60])
def test_bad_fields(http: httpx.Client, path: str, body: dict[str, Any], param: str, says_what: str) -> None:
    error = error_of(http.post(path, json=body))
    assert error["param"] == param
    assert says_what in error["message"]


def test_what_texts_and_pictures_may_have_is_listed_once(http: httpx.Client) -> None:
    error = error_of(http.post(CHAT, json=message(content=cached({"type": "persistent"}))))
    assert error["message"].endswith("'persistent' is not one of 'ephemeral'")


NEUTRAL = {
    "n": 1, "logprobs": False, "top_logprobs": 0, "tools": [], "tool_choice": "auto", "presence_penalty": 0,
    "frequency_penalty": 0.0, "logit_bias": {}, "response_format": {"type": "text"}, "user": "me", "store": False,
    "service_tier": "auto", "parallel_tool_calls": True, "repetition_penalty": 1, "modalities": ["text"],
    "chat_template_kwargs": {}, "add_generation_prompt": True, "continue_final_message": False,
}  # fmt: skip


def test_values_that_change_nothing_pass(http: httpx.Client) -> None:
    assert http.post(CHAT, json=chat(**NEUTRAL)).status_code == 200
    assert http.post(CHAT, json=chat(**dict.fromkeys(NEUTRAL))).status_code == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b'{"messages": [{"role": "user", "content": "\xff"}]}',
     b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b'{"messages": NaN}',
     b'{"messages": [], "tools": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"],
    ids=lambda body: repr(body[:40]),
)  # fmt: skip
def test_bodies_that_are_no_request(http: httpx.Client, body: bytes) -> None:
    error_of(http.post(CHAT, content=body))


def test_half_a_surrogate_pair_is_called_by_its_name(http: httpx.Client) -> None:
    body = b'{"messages": [{"role": "user", "content": "%s"}]}'
    assert "half of a surrogate pair (\\ud83d)" in error_of(http.post(CHAT, content=body % rb"\ud83d"))["message"]
    assert http.post(CHAT, content=body % rb"\ud83d\udc4d \\ud83d").status_code == 200
    assert "truncated" in error_of(http.post(CHAT, content=rb'{"messages": "\\ud83d'))["message"]


def test_a_body_that_is_too_large(http: httpx.Client) -> None:
    error = error_of(http.post(CHAT, json=message(content="x" * MAX_BODY_BYTES)), 413)
    assert str(MAX_BODY_BYTES) in error["message"]


@pytest.mark.parametrize(
    ("headers", "status"), [({}, 413), ({"content-encoding": "gzip"}, 415), ({"transfer-encoding": "chunked"}, 413)]
)
def test_a_client_that_sends_everything_before_it_reads_sees_why_not(
    http: httpx.Client, headers: dict[str, str], status: int
) -> None:
    # urllib asks for the connection to be closed after the answer.
    body = b"x" * (16 * MAX_BODY_BYTES)
    data = iter([body]) if headers.get("transfer-encoding") == "chunked" else body
    asked = urllib.request.Request(str(http.base_url.join(CHAT)), data, headers)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(asked, timeout=30)
    assert caught.value.code == status
    assert json.load(caught.value)["error"]["message"]


def test_a_compressed_body_is_refused_by_its_header(http: httpx.Client) -> None:
    body = json.dumps(chat()).encode()
    refused = http.post(CHAT, content=gzip.compress(body), headers={"content-encoding": "gzip"})
    assert "content-encoding 'gzip'" in error_of(refused, 415)["message"]
    assert http.post(CHAT, content=body, headers={"content-encoding": "Identity"}).status_code == 200


def test_what_other_servers_put_into_their_answers_can_be_sent_back(http: httpx.Client) -> None:
    thoughts = {"reasoning_content": "hm", "reasoning": "hm", "refusal": None, "annotations": []}
    messages = [*chat()["messages"], {"role": "assistant", "content": "Aye."} | thoughts, *chat()["messages"]]
    assert http.post(CHAT, json={"messages": messages}).status_code == 200


def test_unknown_paths_and_methods(http: httpx.Client) -> None:
    error_of(http.get("/v2/chat"), 404)
    response = http.put(CHAT, json={})
    error_of(response, 405)
    assert "POST" in response.headers["allow"]


def test_a_prompt_of_a_megabyte(http: httpx.Client, chat_tokenizer: ModelTokenizer) -> None:
    content = "It was a dark and stormy night. " * 32_000
    error = error_of(http.post(CHAT, json=message(content=content)))
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    template = chat_tokenizer.backend.encode(
        "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
    )
    num_tokens = len(chat_tokenizer.backend.encode(content, add_special_tokens=False)) + len(template)
    assert str(num_tokens) in error["message"]
    assert str(MAX_MODEL_LEN) in error["message"]


@pytest.mark.parametrize(
    ("num_tokens", "status"), [(MAX_MODEL_LEN - 1, 200), (MAX_MODEL_LEN, 400), (MAX_MODEL_LEN + 1, 400)]
)
def test_prompts_about_as_long_as_the_context(http: httpx.Client, num_tokens: int, status: int) -> None:
    response = http.post(COMPLETION, json={"prompt": [5] * num_tokens, "max_tokens": MAX_MODEL_LEN})
    assert response.status_code == status
    if status == 400:
        error = error_of(response)
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
        assert f"{num_tokens} tokens" in error["message"]


def test_what_bounds_a_prompt_is_named(engine: ScriptedEngine, http: httpx.Client) -> None:
    body = {"prompt": [5] * MAX_MODEL_LEN, "max_tokens": 1}
    capabilities = engine.capabilities
    try:
        for is_limited_by_pool, reason in [
            (False, f"the context holds {MAX_MODEL_LEN} tokens (max_model_len), prompt and output together"),
            (
                True,
                f"this server's KV cache holds {MAX_MODEL_LEN} tokens (64 blocks of 16), prompt and output together",
            ),
        ]:
            engine.capabilities = replace_fields(capabilities, is_limited_by_pool=is_limited_by_pool)
            too_long = error_of(http.post(COMPLETION, json=body))["message"]
            assert too_long == f"the prompt has {MAX_MODEL_LEN} tokens; at most {MAX_MODEL_LEN - 1} fit: {reason}"
            too_many = error_of(http.post(COMPLETION, json={"prompt": "x", "max_tokens": 999}))["message"]
            assert too_many == f"max_tokens is 999, but {reason}"
    finally:
        engine.capabilities = capabilities


def test_a_prompt_that_is_hopeless_is_refused_by_its_size(
    engine: ScriptedEngine, chat_tokenizer: ModelTokenizer
) -> None:
    content = "It was a dark and stormy night. " * 100_000
    with live_app(engine, chat_tokenizer) as url:
        error = error_of(httpx.post(url + CHAT, json=message(content=content), timeout=30))
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    template = "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
    assert f"{len(content) + len(template)} bytes of text, at least" in error["message"]


def test_a_template_that_refuses_the_messages(engine: ScriptedEngine, chat_tokenizer: ModelTokenizer) -> None:
    def refuse(_: Any) -> str:
        raise ValueError("roles must alternate")

    assert chat_tokenizer.chat_template is not None
    tokenizer = replace(chat_tokenizer, chat_template=replace(chat_tokenizer.chat_template, apply=refuse))
    with live_app(engine, tokenizer) as url:
        error = error_of(httpx.post(url + CHAT, json=message()))
    assert error["param"] == "messages"
    assert "roles must alternate" in error["message"]


def test_health_tells_the_truth(http: httpx.Client, engine: ScriptedEngine) -> None:
    assert http.get("/health").status_code == 200
    engine.state, engine.down_reason = "down", "it said goodbye"
    try:
        response = http.get("/health")
        error = http.post(CHAT, json=message())
    finally:
        engine.state, engine.down_reason = "ready", None
    assert response.status_code == 503
    assert (response.json()["status"], response.json()["reason"]) == ("down", "it said goodbye")
    assert "it said goodbye" in error_of(error, 503)["message"]


def test_where_no_engine_has_answered_yet_its_socket_is_not_told(http: httpx.Client, engine: ScriptedEngine) -> None:
    engine.state, engine.down_reason = "connecting", "no engine has answered at ipc:///private/engine yet"
    try:
        health = http.get("/health")
        error = http.post(CHAT, json=message())
    finally:
        engine.state, engine.down_reason = "ready", None
    assert (health.status_code, health.json()["reason"]) == (503, "no engine has answered yet")
    assert "no engine has answered yet" in error_of(error, 503)["message"]
    assert "ipc" not in health.text + error.text


def test_health_can_be_asked_for_its_status_only(http: httpx.Client, engine: ScriptedEngine) -> None:
    response = http.head("/health")
    assert (response.status_code, response.content) == (200, b"")
    engine.state = "down"
    try:
        assert http.head("/health").status_code == 503
    finally:
        engine.state = "ready"


def test_a_browser_is_led_to_the_documentation(http: httpx.Client) -> None:
    assert http.get("/", follow_redirects=True).url.path == "/docs"


def test_the_documentation_is_complete_and_comes_from_here(http: httpx.Client) -> None:
    page = http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "://" not in page.text
    for asset in ("swagger-ui-bundle.js", "swagger-ui.css"):
        assert f"/docs/assets/{asset}" in page.text
        assert len(http.get(f"/docs/assets/{asset}").content) > 50_000
    error_of(http.get("/docs/assets/..%2f__init__.py"), 404)
    document = http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.0.")
    assert {
        CHAT,
        COMPLETION,
        "/tokenize",
        "/detokenize",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/cache/probe",
        "/v1/cache/explain",
        "/v1/models",
        "/v1/models/{model_id}",
        "/health",
        "/version",
        "/metrics",
        "/reset_prefix_cache",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    } == set(document["paths"])
    references = {part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]}
    assert references <= set(document["components"]["schemas"])
    assert '"null"' not in json.dumps(document)
    assert http.get("/version").json()["version"] == document["info"]["version"]
