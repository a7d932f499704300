"""`/tokenize` tells exactly what the completion endpoints send to the engine, and works without one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import processors

from frontend.prompt.chat_template import chat_template_of
from frontend.prompt.processor import ALWAYS_COUNTED_BYTES
from frontend.prompt.tokenizer import ModelTokenizer, load_tokenizer
from tests.frontend.http_stack import Scrape
from tests.frontend.live_app import live_app
from tests.frontend.scripted_engine import MAX_MODEL_LEN, VOCAB_SIZE, ScriptedEngine, says
from tests.frontend.templates import TOOL_TEMPLATE, tokenizer_with

CHAT, COMPLETION, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"b": 1, "a": 2}'}}
MESSAGES = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Où?"}, {"type": "text", "text": "Now 🌧"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "Rain.", "tool_call_id": "call_1"},
    {"role": "assistant", "content": "It rains, and"},
]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def tokenizer(chat_model_dir: Path) -> ModelTokenizer:
    """Takes tools, and puts a BOS before a bare text."""
    backend = load_tokenizer(chat_model_dir).backend
    bos = backend.token_to_id("<|im_start|>")
    backend.post_processor = processors.TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", bos)])
    return ModelTokenizer(backend, chat_template_of(tokenizer_with(chat_model_dir, TOOL_TEMPLATE)))


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(says([5], finish_reason="length"))


@pytest.fixture(scope="module")
def http(engine: ScriptedEngine, tokenizer: ModelTokenizer) -> Iterator[httpx.Client]:
    with live_app(engine, tokenizer) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


@pytest.fixture
def no_engine_yet(engine: ScriptedEngine) -> Iterator[None]:
    capabilities = engine.capabilities
    engine.state, engine.capabilities = "connecting", None  # type: ignore[assignment]
    yield
    engine.state, engine.capabilities = "ready", capabilities


def answer(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


PROMPTS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETION, {"prompt": "Où? <|im_end|>"}),
    (CHAT, {"messages": MESSAGES, "tools": TOOLS}),
    (CHAT, {"messages": MESSAGES, "tools": TOOLS, "add_generation_prompt": False}),
    (CHAT, {"messages": MESSAGES, "tools": TOOLS, "continue_final_message": True}),
    (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False}}),
]


@pytest.mark.parametrize(("path", "prompt"), PROMPTS)
def test_the_tokens_are_those_the_engine_gets(
    http: httpx.Client, engine: ScriptedEngine, path: str, prompt: dict[str, Any]
) -> None:
    answer(http.post(path, json=prompt | {"max_tokens": 1}))
    sent = list(engine.requests[-1].prompt_token_ids)
    tokenized = answer(http.post(TOKENIZE, json=prompt))
    assert tokenized == {"count": len(sent), "max_model_len": MAX_MODEL_LEN, "tokens": sent, "token_strs": None}


def test_each_of_these_prompts_is_another_one(http: httpx.Client) -> None:
    assert len({tuple(answer(http.post(TOKENIZE, json=prompt))["tokens"]) for _, prompt in PROMPTS}) == len(PROMPTS)


def test_what_the_tokenizer_adds_can_be_left_out_or_asked_for(http: httpx.Client) -> None:
    def tokens(**fields: Any) -> list[int]:
        return answer(http.post(TOKENIZE, json=fields))["tokens"]  # type: ignore[no-any-return]

    with_bos = tokens(prompt="hi")
    assert tokens(prompt="hi", add_special_tokens=None) == with_bos
    assert tokens(prompt="hi", add_special_tokens=False) == with_bos[1:]
    assert tokens(messages=MESSAGES, add_special_tokens=True) == with_bos[:1] + tokens(messages=MESSAGES)


def test_tokens_are_spelled_as_in_the_vocabulary(http: httpx.Client) -> None:
    asked = {"prompt": "<|im_end|>é lighthouse", "return_token_strs": True, "add_special_tokens": False}
    spellings = answer(http.post(TOKENIZE, json=asked))["token_strs"]
    assert spellings[:3] == ["<|im_end|>", "Ã", "©"]
    assert "".join(spellings[3:]) == "Ġlighthouse"


def test_tokens_become_the_text_they_came_from(http: httpx.Client) -> None:
    text = "<|im_start|>user\n  Où? 🌧\u200d\n\n<|im_end|>"
    tokens = answer(http.post(TOKENIZE, json={"prompt": text, "add_special_tokens": False}))["tokens"]
    assert answer(http.post(DETOKENIZE, json={"tokens": tokens})) == {"prompt": text}
    assert answer(http.post(DETOKENIZE, json={"tokens": []})) == {"prompt": ""}


def test_what_was_tokenized_before_is_remembered_for_the_same_salt_only(http: httpx.Client) -> None:
    def remembered(**fields: Any) -> float:
        def total() -> float:
            return Scrape(http.get("/metrics").text)("tokenizer_cache_hits_total")

        before = total()
        answer(http.post(fields.pop("path", TOKENIZE), json=fields))
        return total() - before

    turns = [{"role": "user", "content": "The lighthouse keeper. " * 13}, {"role": "assistant", "content": "And?"}]
    prompt = "".join(f"<|im_start|>{turn['content']}<|im_end|>" for turn in turns)
    for asked in ({"messages": turns}, {"prompt": prompt}):
        path = CHAT if "messages" in asked else COMPLETION
        for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}):
            assert remembered(**asked, **salt) == 0
            num_tokens = remembered(**asked, **salt)
            assert num_tokens > 0
            assert remembered(path=path, max_tokens=1, **asked, **salt) == num_tokens


def test_a_prompt_that_is_too_long_is_counted(http: httpx.Client) -> None:
    tokenized = answer(http.post(TOKENIZE, json={"prompt": "one two " * MAX_MODEL_LEN}))
    assert tokenized["count"] == len(tokenized["tokens"]) > MAX_MODEL_LEN == tokenized["max_model_len"]


def test_a_prompt_that_is_hopeless_is_refused_by_its_size(http: httpx.Client) -> None:
    refused = http.post(TOKENIZE, json={"prompt": "x" * (4 * ALWAYS_COUNTED_BYTES)})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert f"{4 * ALWAYS_COUNTED_BYTES} bytes of text, at least" in refused.text


@pytest.mark.usefixtures("no_engine_yet")
def test_no_engine_is_needed(http: httpx.Client) -> None:
    tokenized = answer(http.post(TOKENIZE, json={"messages": MESSAGES}))
    assert tokenized["max_model_len"] is None
    assert "Où?\nNow 🌧" in answer(http.post(DETOKENIZE, json={"tokens": tokenized["tokens"]}))["prompt"]
    assert http.post(DETOKENIZE, json={"tokens": [VOCAB_SIZE]}).status_code == 400
    refused = http.post(TOKENIZE, json={"prompt": "x" * (ALWAYS_COUNTED_BYTES + 1)})
    assert refused.status_code == 400
    assert f"{ALWAYS_COUNTED_BYTES + 1} bytes of text; until an engine has answered" in refused.text


def test_a_lost_engine_is_not_missed(http: httpx.Client, engine: ScriptedEngine) -> None:
    engine.state = "down"
    try:
        assert answer(http.post(TOKENIZE, json={"prompt": "hi"}))["max_model_len"] == MAX_MODEL_LEN
    finally:
        engine.state = "ready"


BAD: list[tuple[str, dict[str, Any], int, str | None, str]] = [
    (TOKENIZE, {}, 400, "prompt", "missing required parameter 'prompt' (or 'messages')"),
    (TOKENIZE, {"prompt": "x", "messages": MESSAGES}, 400, "prompt", "not both"),
    (TOKENIZE, {"prompt": ["x"]}, 400, "prompt", "got `array`"),
    (TOKENIZE, {"prompt": "x", "model": "none"}, 404, "model", "'tiny'"),
    (TOKENIZE, {"prompt": "x", "tools": TOOLS}, 400, "tools", "only allowed with messages"),
    (TOKENIZE, {"prompt": "x", "chat_template_kwargs": {}}, 400, "chat_template_kwargs", "only allowed with messages"),
    (TOKENIZE, {"prompt": "x", "temperature": 0}, 400, "temperature", "unrecognized"),
    (TOKENIZE, {"messages": []}, 400, "messages", "empty"),
    (TOKENIZE, {"prompt": "x", "cache_salt": "a/b"}, 400, "cache_salt", "must not contain"),
    (TOKENIZE, {"messages": [{"role": "function", "content": "x"}]}, 400, "messages[0].role", "not supported yet"),
    (DETOKENIZE, {}, 400, "tokens", "missing"),
    (DETOKENIZE, {"tokens": "x"}, 400, "tokens", "got `str`"),
    (DETOKENIZE, {"tokens": [-1]}, 400, "tokens[0]", ">= 0"),
    (DETOKENIZE, {"tokens": [1, VOCAB_SIZE]}, 400, "tokens", f"has {VOCAB_SIZE} tokens (ids 0 to {VOCAB_SIZE - 1})"),
    (DETOKENIZE, {"tokens": [2**63]}, 400, "tokens[0]", ""),
    (DETOKENIZE, {"tokens": [1], "model": "none"}, 404, "model", "'tiny'"),
]


@pytest.mark.parametrize(("path", "body", "status", "param", "says_what"), BAD, ids=lambda value: str(value)[:50])
@pytest.mark.parametrize("is_known", [True, False])
def test_bad_requests(
    request: pytest.FixtureRequest,
    http: httpx.Client,
    path: str,
    body: dict[str, Any],
    status: int,
    param: str,
    says_what: str,
    is_known: bool,
) -> None:
    if not is_known:
        request.getfixturevalue("no_engine_yet")
    response = http.post(path, json=body)
    assert response.status_code == status
    error = response.json()["error"]
    assert error["param"] == param
    assert says_what in error["message"]


@pytest.mark.parametrize(
    ("arguments", "reason"), [("[1]", "got an array"), ("{", "not valid JSON"), ('{"a": NaN}', "not valid JSON")]
)
@pytest.mark.parametrize("path", [TOKENIZE, CHAT])
def test_arguments_that_are_no_json_object(http: httpx.Client, path: str, arguments: str, reason: str) -> None:
    call = CALL | {"function": {"name": "weather", "arguments": arguments}}
    messages = [MESSAGES[1], {"role": "assistant", "tool_calls": [CALL, call]}]
    response = http.post(path, json={"messages": messages, "tools": TOOLS})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[1].tool_calls[1].function.arguments"
    assert reason in response.json()["error"]["message"]


def test_parameters_that_are_no_schema(http: httpx.Client) -> None:
    tools = [*TOOLS, {"type": "function", "function": {"name": "f", "parameters": "x"}}]
    response = http.post(TOKENIZE, json={"messages": MESSAGES, "tools": tools})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools[1].function.parameters"


def test_parameters_nested_without_end(http: httpx.Client) -> None:
    nested = '{"a":' * 20_000 + "1" + "}" * 20_000
    body = (
        '{"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"f","parameters":'
    )
    assert http.post(TOKENIZE, content=f"{body}{nested}}}}}]}}").status_code == 400


def test_no_arguments_are_none(http: httpx.Client) -> None:
    def tokens(arguments: str) -> list[int]:
        call = CALL | {"function": {"name": "weather", "arguments": arguments}}
        asked = {"messages": [MESSAGES[1], {"role": "assistant", "tool_calls": [call]}]}
        return answer(http.post(TOKENIZE, json=asked))["tokens"]  # type: ignore[no-any-return]

    assert tokens("") == tokens("{}")
