"""Calls of tools in answers, as the official OpenAI SDK sees them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from frontend.prompt.chat_template import chat_template_of
from frontend.prompt.tokenizer import ModelTokenizer
from frontend.tool_calls import CLOSING_TAG, OPENING_TAG, TAGS
from tests.frontend.live_app import live_app
from tests.frontend.scripted_engine import ScriptedEngine, continues, says
from tests.frontend.templates import TOOL_TEMPLATE, tokenizer_with
from tests.frontend.test_openai_sdk import HELLO, Served


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


TOOLS: list[Any] = [tool("ships"), tool("wind")]
SHIPS = '<tool_call>\n{"name": "ships", "arguments": {"night": "quiet", "limit" : 2}}\n</tool_call>'
WIND = '<tool_call>\n{"name": "wind", "arguments": {}}\n</tool_call>'
ASKED_SHIPS, ASKED_WIND = ("ships", '{"night": "quiet", "limit" : 2}'), ("wind", "{}")

Answered = tuple[str | None, list[tuple[str, str]], str]

TEXTS: dict[str, Answered] = {
    SHIPS: (None, [ASKED_SHIPS], "tool_calls"),
    f"Let me see.\n{SHIPS}\n{WIND}": ("Let me see.", [ASKED_SHIPS, ASKED_WIND], "tool_calls"),
    f"{WIND}\nSo it is.": ("So it is.", [ASKED_WIND], "tool_calls"),
    f"{SHIPS[:-1]} 你": (f"{SHIPS[:-1]} 你", [], "stop"),
    SHIPS.replace("ships", "cars"): (SHIPS.replace("ships", "cars"), [], "stop"),
    f"{SHIPS.replace('}}', '}')}\n{WIND}": (SHIPS.replace("}}", "}"), [ASKED_WIND], "tool_calls"),
    " The <b>wind</b>, the fog. ": (" The <b>wind</b>, the fog. ", [], "stop"),
}


def serve(tokenizer: Any) -> Iterator[Served]:
    engine = ScriptedEngine(says([]))
    engine.capabilities = msgspec.structs.replace(engine.capabilities, max_model_len=1024)
    served_tokenizer = ModelTokenizer(tokenizer.backend_tokenizer, chat_template_of(tokenizer))
    with live_app(engine, served_tokenizer) as url:
        yield Served(engine, url, served_tokenizer)


@pytest.fixture(scope="module")
def served(chat_model_dir: Path) -> Iterator[Served]:
    yield from serve(tokenizer_with(chat_model_dir, TOOL_TEMPLATE))


@pytest.fixture(scope="module")
def served_with_special_tags(chat_model_dir: Path) -> Iterator[Served]:
    tokenizer = tokenizer_with(chat_model_dir, TOOL_TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": list(TAGS)})
    yield from serve(tokenizer)


@pytest.fixture(scope="module")
def served_with_other_calls(chat_model_dir: Path) -> Iterator[Served]:
    yield from serve(tokenizer_with(chat_model_dir, TOOL_TEMPLATE.replace("<tool_call>", "[call]")))


def say(served: Served, *texts: str, group: int = 1) -> list[list[int]]:
    """Continuation `i` is `texts[i]`, ended by the model. Returns the tokens of each, the last one included."""
    served.engine.requests.clear()
    token_ids = [[*served.ids(text), served.eos] for text in texts]
    served.engine.script = continues(*token_ids, group=group)
    return token_ids


@dataclass
class Choice:
    """A choice put together from its chunks, or whole; the same either way."""

    content: str | None = None
    calls: list[tuple[str, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: Any = None
    logprobs: list[Any] = field(default_factory=list)

    @property
    def answered(self) -> Answered:
        return self.content, self.calls, self.finish_reason


def ask(served: Served, *, stream: bool, n: int = 1, **fields: Any) -> list[Choice]:
    choices = [Choice() for _ in range(n)]
    create = served.sync.chat.completions.create
    if not stream:
        for whole in create(model="tiny", messages=HELLO, n=n, **fields).choices:
            choice = choices[whole.index]
            choice.content, choice.finish_reason = whole.message.content, whole.finish_reason
            for call in whole.message.tool_calls or []:
                choice.calls.append((call.function.name, call.function.arguments))
                choice.ids.append(call.id)
            choice.logprobs += whole.logprobs.content if whole.logprobs else []
            choice.stop_reason = whole.stop_reason
        return choices
    for chunk in create(model="tiny", messages=HELLO, n=n, stream=True, **fields):
        for part in chunk.choices:
            choice = choices[part.index]
            assert not choice.finish_reason
            if part.delta.content:
                choice.content = (choice.content or "") + part.delta.content
            for call in part.delta.tool_calls or []:
                assert call.index == len(choice.calls)
                assert call.type == "function"
                choice.calls.append((call.function.name, call.function.arguments))
                choice.ids.append(call.id)
            choice.logprobs += part.logprobs.content if part.logprobs else []
            if part.finish_reason:
                choice.finish_reason, choice.stop_reason = part.finish_reason, part.stop_reason
    return choices


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("group", [1, 3, 1000])
def test_calls_are_apart_from_the_text(served: Served, text: str, stream: bool, group: int) -> None:
    say(served, text, group=group)
    (choice,) = ask(served, stream=stream, tools=TOOLS)
    assert choice.answered == TEXTS[text]
    assert all(call_id.startswith("call_") for call_id in choice.ids)
    assert len(set(choice.ids)) == len(choice.calls)


@pytest.mark.parametrize("stream", [False, True])
def test_every_choice_has_its_own_calls(served: Served, stream: bool) -> None:
    say(served, *TEXTS)
    choices = ask(served, stream=stream, n=len(TEXTS), tools=TOOLS, tool_choice="auto")
    assert [choice.answered for choice in choices] == list(TEXTS.values())
    ids = [call_id for choice in choices for call_id in choice.ids]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}])
@pytest.mark.parametrize("stream", [False, True])
def test_where_no_tool_may_be_called_all_is_text(served: Served, fields: dict[str, Any], stream: bool) -> None:
    say(served, SHIPS)
    assert ask(served, stream=stream, **fields)[0].answered == (SHIPS, [], "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_writes_calls_in_another_way_answers_text(served_with_other_calls: Served, stream: bool) -> None:
    say(served_with_other_calls, SHIPS)
    assert ask(served_with_other_calls, stream=stream, tools=TOOLS)[0].answered == (SHIPS, [], "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_tags_that_are_special_tokens_are_seen(served_with_special_tags: Served, stream: bool) -> None:
    served = served_with_special_tags
    (token_ids,) = say(served, f"Yes. {SHIPS}{SHIPS[:-1]}")
    assert token_ids.count(served.tokenizer.backend.token_to_id(OPENING_TAG)) == 2
    assert ask(served, stream=stream, tools=TOOLS)[0].answered == (f"Yes. {SHIPS[:-1]}", [ASKED_SHIPS], "tool_calls")
    # As special tokens are, where no tool may be called.
    (choice,) = ask(served, stream=stream, tools=TOOLS, tool_choice="none")
    assert choice.content is not None
    assert OPENING_TAG not in choice.content


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_was_cut_off_says_so(served: Served, stream: bool) -> None:
    for text, content, calls in [
        (f"{SHIPS}\n{WIND[:30]}", WIND[:30], [ASKED_SHIPS]),
        (SHIPS, None, [ASKED_SHIPS]),
        (SHIPS[:30], SHIPS[:30], []),
    ]:
        served.engine.script = says(served.ids(text), finish_reason="length")
        assert ask(served, stream=stream, tools=TOOLS)[0].answered == (content, calls, "length")


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_answers_with_calls(served: Served, stream: bool) -> None:
    text = f"Well: {SHIPS} Result: none"
    for stop, extra, answered in [
        ("Result", {}, ("Well:", [ASKED_SHIPS], "tool_calls")),
        ("quiet", {}, (f"Well: {SHIPS.partition('quiet')[0]}", [], "stop")),
        (CLOSING_TAG, {}, (f"Well: {SHIPS.removesuffix(CLOSING_TAG)}", [], "stop")),
        (CLOSING_TAG, {"include_stop_str_in_output": True}, ("Well:", [ASKED_SHIPS], "tool_calls")),
    ]:
        say(served, text)
        (choice,) = ask(served, stream=stream, tools=TOOLS, stop=[stop], extra_body=extra)
        assert (choice.answered, choice.stop_reason) == (answered, stop)


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_at_most_where_asked_for(served: Served, stream: bool) -> None:
    say(served, f"Let me see.\n{SHIPS}\n{WIND}\nSo.")
    (choice,) = ask(served, stream=stream, tools=TOOLS, parallel_tool_calls=False)
    assert (choice.calls, choice.finish_reason) == ([ASKED_SHIPS], "tool_calls")
    assert choice.content is not None
    assert choice.content.split() == ["Let", "me", "see.", "So."]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("group", [1, 3])
def test_every_token_has_its_log_probability_once(served: Served, text: str, group: int) -> None:
    (token_ids,) = say(served, text, group=group)
    spellings = [served.tokenizer.backend.decode([i], skip_special_tokens=False) for i in token_ids]
    whole, streamed = (
        ask(served, stream=stream, tools=TOOLS, logprobs=True, top_logprobs=1)[0] for stream in (False, True)
    )
    assert streamed.logprobs == whole.logprobs
    assert [entry.token for entry in whole.logprobs] == spellings


@pytest.mark.parametrize("group", [1, 1000])
def test_log_probabilities_come_with_what_their_tokens_begin(served: Served, group: int) -> None:
    say(served, f"Let me see.{SHIPS}So.", group=group)
    chunks = served.sync.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS, logprobs=True, stream=True)
    texts = {"content": "", "call": ""}
    for chunk in chunks:
        (choice,) = chunk.choices
        if choice.finish_reason is None and choice.logprobs is not None:
            assert choice.logprobs.content is not None
            texts["call" if choice.delta.tool_calls else "content"] += "".join(
                bytes(entry.bytes or ()).decode() for entry in choice.logprobs.content
            )
    assert texts == {"content": "Let me see.So.", "call": SHIPS}


def test_text_is_shown_before_the_call_is_complete(served: Served) -> None:
    say(served, f"Let me see.\n{SHIPS}")
    chunks = list(served.sync.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS, stream=True))
    contents = [chunk.choices[0].delta.content for chunk in chunks]
    assert len([content for content in contents if content]) > 3
    assert all(chunk.choices[0].delta.content or chunk.choices[0].delta.tool_calls for chunk in chunks[1:-1])


def test_usage_counts_the_tokens_of_calls(served: Served) -> None:
    (token_ids,) = say(served, SHIPS)
    answer = served.sync.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(token_ids)


def test_the_sdks_stream_helper(served: Served) -> None:
    say(served, f"Let me see.\n{SHIPS}\n{WIND}")
    with served.sync.chat.completions.stream(model="tiny", messages=HELLO, tools=TOOLS) as stream:
        events = list(stream)
        answer = stream.get_final_completion()
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [(event.name, event.arguments) for event in done] == [ASKED_SHIPS, ASKED_WIND]
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
    assert [call.function.name for call in choice.message.tool_calls or []] == ["ships", "wind"]


@pytest.mark.parametrize("helper", [False, True])
def test_an_answer_with_calls_can_be_sent_back_as_it_came(served: Served, helper: bool) -> None:
    say(served, f"{SHIPS}\n{WIND}")
    completions = served.sync.chat.completions
    answer: Any
    if helper:
        with completions.stream(model="tiny", messages=HELLO, tools=TOOLS) as stream:
            answer = stream.get_final_completion()
    else:
        answer = completions.create(model="tiny", messages=HELLO, tools=TOOLS)
    message = answer.choices[0].message
    results: list[Any] = [
        {"role": "tool", "tool_call_id": call.id, "content": "Two."} for call in message.tool_calls or []
    ]
    say(served, "Two ships.")
    completions.create(model="tiny", messages=[*HELLO, message, *results], tools=TOOLS)
    (request,) = served.engine.requests
    prompt = served.tokenizer.decode(request.prompt_token_ids)
    # As the model said it, but for what canonical JSON changes.
    said = f"{SHIPS}\n{WIND}".replace('{"night": "quiet", "limit" : 2}', '{"limit": 2, "night": "quiet"}')
    assert f"<|im_start|>assistant\n{said}<|im_end|>" in prompt


def test_what_a_client_without_an_sdk_sees(served: Served) -> None:
    say(served, SHIPS)
    body = {"messages": HELLO, "tools": TOOLS}
    message = httpx.post(f"{served.url}/v1/chat/completions", json=body).json()["choices"][0]["message"]
    (call,) = message.pop("tool_calls")
    assert message == {"role": "assistant", "content": None, "refusal": None}
    assert call.pop("id").startswith("call_")
    name, arguments = ASKED_SHIPS
    assert call == {"type": "function", "function": {"name": name, "arguments": arguments}}
    lines = httpx.post(f"{served.url}/v1/chat/completions", json=body | {"stream": True}).text.split("\n\n")
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines[:-2]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    (streamed,) = deltas[1]["tool_calls"]
    assert streamed.pop("id").startswith("call_")
    assert streamed == {"index": 0, "type": "function", "function": {"name": name, "arguments": arguments}}
    assert deltas[2:] == [{}]
    say(served, "Hello!")
    message = httpx.post(f"{served.url}/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Hello!", "refusal": None}


def test_the_document_describes_calls(served: Served) -> None:
    schemas = httpx.get(f"{served.url}/openapi.json").json()["components"]["schemas"]
    assert schemas["AssistantMessage"]["properties"]["content"]["nullable"]
    assert "tool_calls" in schemas["AssistantMessage"]["properties"]
    assert "index" in schemas["ToolCallDelta"]["properties"]
    assert "tool_calls" in schemas["ChatChoice"]["properties"]["finish_reason"]["enum"]
