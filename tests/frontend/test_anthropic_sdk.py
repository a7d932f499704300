"""The official Anthropic SDK, against the real application: what it gets, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from frontend.engine_errors import EngineUnavailableError, RequestRefusedError
from frontend.prompt.chat_template import chat_template_of
from frontend.prompt.tokenizer import ModelTokenizer
from ipc.vocabulary import ExtraKeySpan, RequestError, SamplingParams
from tests.frontend.anthropic_app import HELLO, MAX_MODEL_LEN, Served, anthropic_app
from tests.frontend.scripted_engine import fails_after, says
from tests.frontend.templates import TOOL_TEMPLATE, tokenizer_with

TEXT = "Ship 12: the 👨‍👩‍👧‍👦 arrived — 你好."
BOTH = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture(scope="module")
def served(chat_model_dir: Path) -> Iterator[Served]:
    tokenizer = tokenizer_with(chat_model_dir, TOOL_TEMPLATE)
    with anthropic_app(ModelTokenizer(tokenizer.backend_tokenizer, chat_template_of(tokenizer))) as served:
        yield served


@pytest.fixture(autouse=True)
def engine_is_fresh(served: Served) -> None:
    served.engine.state, served.engine.down_reason = "ready", None
    served.engine.requests.clear()
    served.engine.aborted.clear()


@BOTH
def test_a_message(served: Served, stream: bool) -> None:
    served.say(TEXT)
    answer = served.answered(stream, system="You keep the log.")
    assert answer.id.startswith("msg_")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "tiny")
    assert [(block.type, block.text) for block in answer.content] == [("text", TEXT)]  # type: ignore[union-attr]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    (request,) = served.engine.requests
    assert answer.usage.input_tokens == len(request.prompt_token_ids)
    assert answer.usage.output_tokens == len(served.ids(TEXT)) + 1
    assert not served.engine.aborted


async def test_the_asynchronous_client(served: Served) -> None:
    served.say(TEXT)
    client = anthropic.AsyncAnthropic(base_url=served.url, api_key="unused", max_retries=0)
    answer = await client.messages.create(model="tiny-alias", max_tokens=9, messages=HELLO)
    assert answer.model == "tiny-alias"
    async with client.messages.stream(model="tiny", max_tokens=9, messages=HELLO) as stream:
        assert "".join([text async for text in stream.text_stream]) == TEXT


@pytest.mark.parametrize("group", [1, 3, 100])
def test_the_events_of_a_stream(served: Served, group: int) -> None:
    served.say(TEXT, group=group, num_cached_tokens=7)
    events = list(served.client.messages.create(model="tiny", max_tokens=64, messages=HELLO, stream=True))
    kinds = [event.type for event in events]
    num_deltas = kinds.count("content_block_delta")
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * num_deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start: Any = events[0]
    assert (start.message.content, start.message.stop_reason) == ([], None)
    assert start.message.usage.cache_read_input_tokens == 7
    end: Any = events[-2]
    assert end.delta.stop_reason == "end_turn"
    assert end.usage.output_tokens == len(served.ids(TEXT)) + 1
    assert end.usage.input_tokens == start.message.usage.input_tokens
    assert all(event.delta.text for event in events if event.type == "content_block_delta")  # type: ignore[union-attr]


@BOTH
def test_an_answer_without_text_has_no_block(served: Served, stream: bool) -> None:
    served.say("")
    answer = served.answered(stream)
    assert (answer.content, answer.stop_reason, answer.usage.output_tokens) == ([], "end_turn", 1)


@BOTH
def test_an_answer_can_be_sent_back_as_it_came(served: Served, stream: bool) -> None:
    served.say("Aye.")
    answer = served.answered(stream)
    follow_up = {"role": "user", "content": "And then?"}
    as_text = {"role": "assistant", "content": "Aye."}
    for turn in (answer.to_param(), {"role": "assistant", "content": answer.model_dump()["content"]}, as_text):
        served.create(messages=[*HELLO, turn, follow_up])
    first, *others = [request.prompt_token_ids for request in served.engine.requests]
    assert others[0] == others[1] == others[2]
    assert others[0][: len(first)] == first


@BOTH
@pytest.mark.parametrize(
    ("said", "settings", "fields", "text", "stop_reason", "stop_sequence"),
    [
        ("one two", {"finish_reason": "length"}, {"max_tokens": None}, "one two", "max_tokens", None),
        ("one two", {"finish_reason": "length"}, {}, "one two", "model_context_window_exceeded", None),
        ("one two three", {}, {"stop_sequences": ["zz", "o three"]}, "one tw", "stop_sequence", "o three"),
        ("one two", {}, {"stop_sequences": ["zz"]}, "one two", "end_turn", None),
    ],
)
def test_why_it_ends(
    served: Served,
    said: str,
    settings: dict[str, Any],
    fields: dict[str, Any],
    text: str,
    stop_reason: str,
    stop_sequence: str | None,
    stream: bool,
) -> None:
    served.say(said, **settings)
    if "max_tokens" in fields:
        fields = {"max_tokens": len(served.ids(said))}
    answer = served.answered(stream, **fields)
    assert [block.text for block in answer.content] == [text]  # type: ignore[union-attr]
    assert (answer.stop_reason, answer.stop_sequence) == (stop_reason, stop_sequence)


@BOTH
def test_no_tokens_at_all_fill_the_cache(served: Served, stream: bool) -> None:
    """The engine makes one token even so; it is neither shown nor counted."""
    served.engine.script = says(served.ids("x"), finish_reason="length")
    answer = served.answered(stream, max_tokens=0)
    assert (answer.content, answer.stop_reason, answer.usage.output_tokens) == ([], "max_tokens", 0)
    assert served.engine.requests[0].sampling_params.max_tokens == 1


def test_an_answer_that_has_begun_goes_on(served: Served) -> None:
    served.say(" four.")
    begun = {"role": "assistant", "content": "Two and two is"}
    served.create(messages=[*HELLO, begun])
    assert served.prompt().endswith("<|im_start|>assistant\nTwo and two is")


def test_what_the_engine_is_told(served: Served) -> None:
    served.say("ok")
    served.create(
        max_tokens=5,
        stop_sequences=["x"],
        metadata={"user_id": "u"},
        service_tier="auto",
        thinking={"type": "disabled"},
        extra_headers={"anthropic-beta": "some-beta-2026-01-01"},
        extra_body={
            "temperature": 0.25,
            "top_p": 0.5,
            "top_k": 9,
            "cache_salt": "pepper",
            "cache": {"read": False},
        },
    )
    served.create()
    served.create(extra_body={"cache": {"write": False}})
    told, default, not_written = served.engine.requests
    assert told.sampling_params == SamplingParams(temperature=0.25, top_k=9, top_p=0.5, max_tokens=5)
    assert told.extra_key_spans == (ExtraKeySpan(0, 1, "cache_salt", "pepper"),)
    assert (told.read_prefix_cache, told.write_prefix_cache, told.tenant) == (False, True, "pepper")
    assert default.sampling_params == SamplingParams(max_tokens=64)
    assert (default.read_prefix_cache, default.write_prefix_cache, default.keep) == (True, True, ())
    assert not not_written.write_prefix_cache


def test_a_key_is_sent_as_this_sdk_does(chat_tokenizer: ModelTokenizer) -> None:
    with anthropic_app(chat_tokenizer, api_keys=("sk-first", "sk-second")) as served:
        served.say("ok")
        for key in ({"api_key": "sk-second"}, {"auth_token": "sk-first"}):
            client = anthropic.Anthropic(base_url=served.url, max_retries=0, **key)  # type: ignore[arg-type]
            assert client.messages.create(model="tiny", max_tokens=9, messages=HELLO).stop_reason == "end_turn"
        with pytest.raises(anthropic.AuthenticationError) as caught:
            served.create()
        assert caught.value.type == "authentication_error"
        assert caught.value.request_id == caught.value.body["request_id"]  # type: ignore[index]


def test_whoever_sends_one_key_shares_the_cache_however_it_is_sent(chat_tokenizer: ModelTokenizer) -> None:
    with anthropic_app(chat_tokenizer, api_keys=("sk-first", "sk-second"), isolation="api-key") as served:
        served.say("ok")
        told = []
        for key in ({"api_key": "sk-first"}, {"auth_token": "sk-first"}, {"api_key": "sk-second"}):
            client = anthropic.Anthropic(base_url=served.url, max_retries=0, **key)  # type: ignore[arg-type]
            client.messages.create(model="tiny", max_tokens=9, messages=HELLO)
            request = served.engine.requests[-1]
            told.append((request.extra_key_spans, request.tenant))
    assert told[0] == told[1] != told[2]


def test_tokens_are_counted_as_they_are_used(served: Served) -> None:
    served.say("ok")
    chats: list[dict[str, Any]] = [
        {},
        {"system": [{"type": "text", "text": "You keep the log."}, {"type": "text", "text": "Be brief."}]},
        {"messages": [*HELLO, {"role": "assistant", "content": "Two and"}]},
        {"tools": [{"name": "wind", "input_schema": {"type": "object"}}], "tool_choice": {"type": "none"}},
    ]
    assert [served.count(**chat) for chat in chats] == [served.create(**chat).usage.input_tokens for chat in chats]
    assert len(served.engine.requests) == len(chats)


def test_tokens_are_counted_without_an_engine_and_beyond_what_fits(served: Served) -> None:
    served.engine.state = "down"
    assert served.count(messages=[{"role": "user", "content": "x y " * MAX_MODEL_LEN}]) > MAX_MODEL_LEN


def test_an_unknown_model(served: Served) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        served.create(model="claude-9")
    assert caught.value.type == "not_found_error"
    assert "'tiny'" in caught.value.message


@BOTH
def test_no_engine(served: Served, stream: bool) -> None:
    served.engine.state, served.engine.down_reason = "down", "the engine was silent for 4.2 s"
    with pytest.raises(anthropic.InternalServerError) as caught:
        served.answered(stream)
    assert (caught.value.status_code, caught.value.type) == (503, "overloaded_error")
    assert "silent for 4.2 s" in caught.value.message
    assert int(caught.value.response.headers["retry-after"]) >= 1


def test_an_engine_lost_in_a_stream_raises_in_the_client(served: Served) -> None:
    served.engine.script = fails_after(served.ids("one two"), EngineUnavailableError("lost"))
    arrived: list[Any] = []
    with (
        pytest.raises(anthropic.APIStatusError, match="lost") as caught,
        served.client.messages.create(model="tiny", max_tokens=9, messages=HELLO, stream=True) as events,
    ):
        arrived.extend(events)
    assert caught.value.type == "overloaded_error"
    assert caught.value.request_id == caught.value.body["request_id"]  # type: ignore[index]
    assert arrived


def test_an_unexpected_failure_is_ours(served: Served) -> None:
    served.engine.script = fails_after([], ZeroDivisionError())
    with pytest.raises(anthropic.InternalServerError) as caught:
        served.create()
    assert (caught.value.status_code, caught.value.type) == (500, "api_error")


@BOTH
@pytest.mark.parametrize(
    ("error", "status", "kind", "message"),
    [
        (RequestError("invalid", "it needs 70 blocks", "prompt_token_ids"), 400, "invalid_request_error", "messages: "),
        (RequestError("invalid", "top_k is wrong", "top_k"), 400, "invalid_request_error", "top_k is wrong"),
        (RequestError("overloaded", "too slow"), 503, "overloaded_error", "too slow"),
        (RequestError("internal", "a step failed"), 500, "api_error", "a step failed"),
    ],
)
def test_what_the_engine_refuses(
    served: Served, error: RequestError, status: int, kind: str, message: str, stream: bool
) -> None:
    served.engine.script = fails_after([], RequestRefusedError(error))
    with pytest.raises(anthropic.APIStatusError) as caught:
        served.answered(stream)
    assert (caught.value.status_code, caught.value.type) == (status, kind)
    assert message in caught.value.message
