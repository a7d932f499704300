"""What an answer can hold besides one text: several choices, log-probabilities, the prompt, running usage."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from frontend.engine_errors import RequestRefusedError
from frontend.prompt.tokenizer import ModelTokenizer
from ipc.vocabulary import RequestError, RequestOutput, TokenLogprob
from tests.frontend.live_app import live_app
from tests.frontend.scripted_engine import ScriptedEngine, continues, fails_after, says, scored
from tests.frontend.test_openai_sdk import HELLO, Served

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
TEXTS = ["Ship 12: the 👨‍👩‍👧‍👦 arrived — 你好.", "one two three four", "The wind, the fog."]


@pytest.fixture(scope="module")
def served(chat_tokenizer: ModelTokenizer) -> Iterator[Served]:
    engine = ScriptedEngine(says([]))
    with live_app(engine, chat_tokenizer) as url:
        yield Served(engine, url, chat_tokenizer)


@pytest.fixture(autouse=True)
def engine_is_fresh(served: Served) -> None:
    served.engine.requests.clear()
    served.engine.aborted.clear()
    served.engine.aborted_continuations.clear()


def say(served: Served, *texts: str, group: int = 1) -> list[list[int]]:
    """Continuation `i` is `texts[i]`, ended by the model. Returns the tokens of each, the last one included."""
    token_ids = [[*served.ids(text), served.eos] for text in texts]
    served.engine.script = continues(*token_ids, group=group)
    return token_ids


@dataclass
class Answer:
    """An answer put together from its chunks, or whole; the same either way."""

    texts: dict[int, str] = field(default_factory=dict)
    ends: dict[int, tuple[str, Any]] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    usage: Any = None

    def add(self, choice: Any, text: str | None, logprobs: list[Any]) -> None:
        self.texts[choice.index] = self.texts.get(choice.index, "") + (text or "")
        self.logprobs.setdefault(choice.index, []).extend(logprobs)
        if choice.finish_reason is not None:
            assert choice.index not in self.ends
            self.ends[choice.index] = (choice.finish_reason, choice.stop_reason)


def completion_tokens(logprobs: Any) -> list[Any]:
    if logprobs is None:
        return []
    return list(zip(logprobs.text_offset, logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True))


def complete(served: Served, *, stream: bool, **fields: Any) -> Answer:
    answer = Answer()
    if not stream:
        whole = served.sync.completions.create(model="tiny", **fields)
        for choice in whole.choices:
            answer.add(choice, choice.text, completion_tokens(choice.logprobs))
        answer.usage = whole.usage
        return answer
    for chunk in served.sync.completions.create(
        model="tiny", stream=True, stream_options={"include_usage": True}, **fields
    ):
        for choice in chunk.choices:
            answer.add(choice, choice.text, completion_tokens(choice.logprobs))
        answer.usage = chunk.usage
    return answer


def chat(served: Served, *, stream: bool, **fields: Any) -> Answer:
    answer = Answer()
    if not stream:
        whole = served.sync.chat.completions.create(model="tiny", messages=HELLO, **fields)
        for choice in whole.choices:
            answer.add(choice, choice.message.content, choice.logprobs.content if choice.logprobs else [])
        answer.usage = whole.usage
        return answer
    for chunk in served.sync.chat.completions.create(
        model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}, **fields
    ):
        for choice in chunk.choices:
            answer.add(choice, choice.delta.content, choice.logprobs.content if choice.logprobs else [])
        answer.usage = chunk.usage
    return answer


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("stop", [None, ["o t", "the f"]])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("group", [1, 4])
def test_streamed_completions_are_the_whole_ones(
    served: Served, n: int, logprobs: int | None, stop: Any, echo: bool, group: int
) -> None:
    say(served, *TEXTS, group=group)
    fields = {"prompt": ["Once", "Twice upon"], "n": n, "logprobs": logprobs, "stop": stop, "echo": echo}
    whole, streamed = (complete(served, stream=stream, **fields) for stream in (False, True))
    assert streamed == whole
    assert sorted(whole.texts) == list(range(2 * n)), "choices are numbered by prompt, then by continuation"
    cut = [text if stop is None else text.split("o t")[0].split("the f")[0] for text in TEXTS]
    for index, text in whole.texts.items():
        prompt = ["Once", "Twice upon"][index // n] if echo else ""
        assert text == prompt + cut[index % n]
        for offset, token, _, _ in whole.logprobs[index]:
            shown = text[offset:]
            assert shown.startswith(token) or "\ufffd" in token or token.startswith(shown or "<|im_end|>")
    assert served.engine.requests[0].sampling_params.n == n
    assert len(served.engine.requests) == 4, "one request per prompt, whatever n"


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("logprobs", [{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3}])
@pytest.mark.parametrize("stop", [None, ["o t", "the f"]])
@pytest.mark.parametrize("group", [1, 4])
def test_streamed_chats_are_the_whole_ones(
    served: Served, n: int, logprobs: dict[str, Any], stop: Any, group: int
) -> None:
    say(served, *TEXTS, group=group)
    whole, streamed = (chat(served, stream=stream, n=n, stop=stop, **logprobs) for stream in (False, True))
    assert streamed == whole
    cut = [text if stop is None else text.split("o t")[0].split("the f")[0] for text in TEXTS]
    assert whole.texts == dict(enumerate(cut[:n]))


@pytest.mark.parametrize("stream", [False, True])
def test_usage_counts_the_prompt_once_and_all_choices(served: Served, stream: bool) -> None:
    token_ids = say(served, *TEXTS)
    answer = chat(served, stream=stream, n=3)
    (request,) = served.engine.requests
    assert answer.usage.prompt_tokens == len(request.prompt_token_ids)
    assert answer.usage.completion_tokens == sum(map(len, token_ids))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_one_choice_in_the_engine_too(served: Served, stream: bool) -> None:
    say(served, *TEXTS)
    answer = chat(served, stream=stream, n=3, stop="o t")
    assert answer.ends == {0: ("stop", None), 1: ("stop", "o t"), 2: ("stop", None)}
    (request,) = served.engine.requests
    assert served.engine.aborted_continuations == [(request.request_id, 1)]
    # Nobody else can tell the engine that all of it is over.
    assert served.engine.aborted == [request.request_id]


def test_every_streamed_choice_begins_with_its_role(served: Served) -> None:
    say(served, *TEXTS)
    firsts: dict[int, Any] = {}
    for chunk in served.sync.chat.completions.create(model="tiny", messages=HELLO, n=3, stream=True):
        firsts.setdefault(chunk.choices[0].index, chunk.choices[0].delta)
    assert [firsts[index].role for index in range(3)] == ["assistant"] * 3


def test_chat_log_probabilities(served: Served) -> None:
    (token_ids,) = say(served, "a 你")
    (choice,) = served.sync.chat.completions.create(model="tiny", messages=HELLO, logprobs=True, top_logprobs=2).choices
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content is not None
    assert choice.logprobs.refusal is None
    assert len(content) == len(token_ids)
    # The model's end is a token of its own; of the others the bytes add up to the text, parts of characters included.
    assert b"".join(bytes(token.bytes or []) for token in content) == "a 你<|im_end|>".encode()
    for token_id, token in zip(token_ids, content, strict=True):
        assert token.token == bytes(token.bytes or []).decode(errors="replace")
        likeliest, second = token.top_logprobs
        assert token.logprob == scored(token_id, 0).logprob
        assert (second.token, second.bytes, second.logprob) == (token.token, token.bytes, token.logprob)
        assert likeliest.logprob == token.logprob + 0.125
    assert any("\ufffd" in token.token for token in content)
    assert served.engine.requests[0].sampling_params.logprobs == 2


def test_chat_without_log_probabilities_has_none(served: Served) -> None:
    say(served, "fine")
    for fields in ({}, {"logprobs": False}, {"logprobs": False, "top_logprobs": 0}):
        (choice,) = served.sync.chat.completions.create(model="tiny", messages=HELLO, **fields).choices  # type: ignore[call-overload]
        assert choice.logprobs is None
    assert {request.sampling_params.logprobs for request in served.engine.requests} == {None}


def test_completion_log_probabilities(served: Served) -> None:
    (token_ids,) = say(served, " went home")
    (choice,) = served.sync.completions.create(model="tiny", prompt="It", logprobs=1).choices
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or []) == " went home<|im_end|>"
    assert choice.logprobs.token_logprobs == [scored(token_id, 0).logprob for token_id in token_ids]
    offsets = itertools.accumulate(map(len, choice.logprobs.tokens or []), initial=0)
    assert choice.logprobs.text_offset == [*offsets][:-1]
    for token, logprob, top in zip(
        choice.logprobs.tokens or [], choice.logprobs.token_logprobs, choice.logprobs.top_logprobs or [], strict=True
    ):
        # The one likeliest, and the token itself.
        assert len(top) == 2
        assert top[token] == logprob < max(top.values())


def test_an_impossible_token_has_a_number_that_json_can_hold(served: Served) -> None:
    async def script(request: Any) -> Any:
        logprob = TokenLogprob(served.ids("a")[0], -math.inf, 9, [])
        yield RequestOutput(request.request_id, [logprob.token_id], 0, "length", logprobs=[logprob])

    served.engine.script = script
    (choice,) = served.sync.completions.create(model="tiny", prompt="x", logprobs=0).choices
    assert choice.logprobs is not None
    assert (choice.logprobs.token_logprobs, choice.logprobs.top_logprobs) == ([-9999.0], [{"a": -9999.0}])


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_log_probabilities_scores_the_prompt(served: Served, stream: bool) -> None:
    say(served, " There", " you")
    prompt = served.ids("Hello 你")
    answer = complete(served, stream=stream, prompt="Hello 你", echo=True, logprobs=1, n=2, max_tokens=5)
    assert answer.texts == {0: "Hello 你 There", 1: "Hello 你 you"}
    for index in (0, 1):
        tokens = answer.logprobs[index]
        assert tokens[0][2:] == (None, None), "nothing predicts the first token"
        assert [token[2] for token in tokens[1 : len(prompt)]] == [scored(i, 0).logprob for i in prompt[1:]]
        assert [token[0] for token in tokens[: len(prompt)]][-1] == len("Hello ")
        assert tokens[len(prompt)][0] == len("Hello 你")
    params = served.engine.requests[0].sampling_params
    assert (params.logprobs, params.prompt_logprobs) == (1, 1)
    assert answer.usage.completion_tokens == len(served.ids(" There")) + len(served.ids(" you")) + 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_prompt_can_be_scored_without_generating(served: Served, stream: bool, logprobs: int | None) -> None:
    served.engine.script = continues(served.ids("x"))
    prompt = served.ids("Hello there")
    answer = complete(served, stream=stream, prompt=[prompt], echo=True, logprobs=logprobs, max_tokens=0)
    assert (answer.texts, answer.ends) == ({0: "Hello there"}, {0: ("length", None)})
    assert len(answer.logprobs[0]) == (0 if logprobs is None else len(prompt))
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (0, len(prompt))
    params = served.engine.requests[0].sampling_params
    assert (params.max_tokens, params.logprobs, params.prompt_logprobs) == (1, None, logprobs)


def test_echo_repeats_what_was_sent(served: Served) -> None:
    say(served, "!")
    with_special = "<|im_start|>user\nhi<|im_end|>"
    token_ids = served.ids(with_special)
    for prompt, text in [(with_special, with_special), (token_ids, "user\nhi")]:
        answer = complete(served, stream=False, prompt=prompt, echo=True, logprobs=0)
        assert answer.texts[0] == text + "!"
        for offset, token, _, _ in answer.logprobs[0][: len(token_ids)]:
            assert text.startswith(token, offset) or (token.startswith("<|") and prompt is token_ids)
        assert answer.logprobs[0][len(token_ids)][0] == len(text)


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_prompt_log_probabilities(served: Served, path: str) -> None:
    say(served, "fine", "well")
    body = {"messages": HELLO} if path == CHAT else {"prompt": "Hello there"}
    answer = httpx.post(served.url + path, json=body | {"prompt_logprobs": 2, "n": 2}, timeout=30).json()
    (request,) = served.engine.requests
    holders = [answer] if path == CHAT else answer["choices"]
    assert len(holders) == (1 if path == CHAT else 2)
    for holder in holders:
        first, *others = holder["prompt_logprobs"]
        assert first is None
        for token_id, place in zip(request.prompt_token_ids[1:], others, strict=True):
            own = scored(token_id, 0)
            text = served.tokenizer.backend.decode([token_id], skip_special_tokens=False)
            assert next(iter(place)) == str(token_id)
            assert place[str(token_id)] == {"logprob": own.logprob, "rank": 2, "decoded_token": text}
            assert [entry["rank"] for entry in place.values()] == [2, 1]
    assert "prompt_logprobs" not in (answer["choices"][0] if path == CHAT else answer)
    assert request.sampling_params.logprobs is None


def test_without_prompt_log_probabilities_nothing_is_said_of_them(served: Served) -> None:
    say(served, "fine")
    assert "prompt_logprobs" not in httpx.post(served.url + CHAT, json={"messages": HELLO}, timeout=30).text


def test_prompt_log_probabilities_that_are_too_many_are_refused_by_the_field_that_asked(served: Served) -> None:
    served.engine.script = fails_after([], RequestRefusedError(RequestError("invalid", "many", "prompt_logprobs")))
    for fields, param in [({"echo": True, "logprobs": 5}, "logprobs"), ({"prompt_logprobs": 5}, "prompt_logprobs")]:
        answer = httpx.post(served.url + COMPLETION, json={"prompt": "x"} | fields, timeout=30)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("include_usage", [False, True])
def test_continuous_usage_is_in_every_chunk(served: Served, path: str, include_usage: bool) -> None:
    tokens = served.ids("one two three")
    served.engine.script = says(tokens, finish_reason="length", num_cached_tokens=3)
    body = {"messages": HELLO} if path == CHAT else {"prompt": "Hello"}
    options = {"include_usage": include_usage, "continuous_usage_stats": True}
    response = httpx.post(served.url + path, json=body | {"stream": True, "stream_options": options}, timeout=30)
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    usages = [json.loads(line)["usage"] for line in lines if line != "[DONE]"]
    (request,) = served.engine.requests
    assert {usage["prompt_tokens"] for usage in usages} == {len(request.prompt_token_ids)}
    assert {usage["prompt_tokens_details"]["cached_tokens"] for usage in usages} == {3}
    completion = [usage["completion_tokens"] for usage in usages]
    assert completion == sorted(completion)
    assert (completion[0], completion[-1]) == (1, len(tokens))
    assert json.loads(lines[-2])["choices"] == [] if include_usage else json.loads(lines[-2])["choices"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_text_can_include_what_stopped_it(served: Served, stream: bool) -> None:
    say(served, "one two three")
    answer = chat(served, stream=stream, stop="o t", extra_body={"include_stop_str_in_output": True})
    assert (answer.texts, answer.ends) == ({0: "one two t"}, {0: ("stop", "o t")})


def test_bad_words_reach_the_engine_alone_and_after_a_space(served: Served) -> None:
    say(served, "fine")
    served.sync.chat.completions.create(
        model="tiny", messages=HELLO, extra_body={"bad_words": ["lighthouse", " wind", "lighthouse"]}
    )
    assert served.engine.requests[0].sampling_params.bad_words_token_ids == tuple(
        tuple(served.ids(text)) for text in ("lighthouse", " lighthouse", "wind", " wind")
    )


def test_best_of_n_is_n(served: Served) -> None:
    say(served, *TEXTS)
    assert len(served.sync.completions.create(model="tiny", prompt="x", n=3, best_of=3).choices) == 3
