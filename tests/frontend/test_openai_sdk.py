"""The official OpenAI SDK, against the real application: what it gets, sync, async and streamed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from frontend.engine_errors import EngineUnavailableError, RequestRefusedError
from frontend.prompt.tokenizer import ModelTokenizer
from ipc.vocabulary import ExtraKeySpan, RequestError, SamplingParams
from tests.frontend.live_app import live_app
from tests.frontend.scripted_engine import MAX_MODEL_LEN, ScriptedEngine, fails_after, says

HELLO: list[Any] = [{"role": "user", "content": "Hello!"}]
TEXT = "Ship 12: the 👨‍👩‍👧‍👦 arrived — 你好."


class Served:
    def __init__(self, engine: ScriptedEngine, url: str, tokenizer: ModelTokenizer) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.sync = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
        self.url = url

    def asynchronous(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.backend.encode(text, add_special_tokens=False).ids

    @property
    def eos(self) -> int:
        return self.tokenizer.backend.token_to_id("<|im_end|>")  # type: ignore[no-any-return]

    @contextmanager
    def saying(self, text: str, **settings: Any) -> Iterator[None]:
        """Answers are `text`, ended by the model itself unless `finish_reason` says otherwise."""
        ending = [self.eos] if settings.get("finish_reason", "stop") == "stop" else []
        self.engine.script = says([*self.ids(text), *ending], **settings)
        yield


@pytest.fixture(scope="module")
def served(chat_tokenizer: ModelTokenizer) -> Iterator[Served]:
    engine = ScriptedEngine(says([]))
    with live_app(engine, chat_tokenizer) as url:
        yield Served(engine, url, chat_tokenizer)


@pytest.fixture(autouse=True)
def engine_is_fresh(served: Served) -> None:
    served.engine.state, served.engine.down_reason = "ready", None
    served.engine.requests.clear()
    served.engine.aborted.clear()


def test_chat(served: Served) -> None:
    with served.saying(TEXT, num_cached_tokens=7):
        answer = served.sync.chat.completions.create(model="tiny", messages=HELLO)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "stop")
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "tiny"
    assert answer.usage is not None
    (request,) = served.engine.requests
    num_output_tokens = len(served.ids(TEXT)) + 1
    assert answer.usage.prompt_tokens == len(request.prompt_token_ids)
    assert answer.usage.completion_tokens == num_output_tokens
    assert answer.usage.total_tokens == len(request.prompt_token_ids) + num_output_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 7
    assert not served.engine.aborted


async def test_chat_async_and_under_an_alias(served: Served) -> None:
    with served.saying(TEXT, finish_reason="length"):
        answer = await served.asynchronous().chat.completions.create(model="tiny-alias", messages=HELLO)
    assert answer.model == "tiny-alias"
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (TEXT, "length")


def test_an_answer_can_be_sent_back_as_it_came(served: Served) -> None:
    with served.saying("Aye."):
        answer = served.sync.chat.completions.create(model="tiny", messages=HELLO)
        messages: list[Any] = [*HELLO, answer.choices[0].message, {"role": "user", "content": "And then?"}]
        served.sync.chat.completions.create(model="tiny", messages=messages)
    first, second = served.engine.requests
    assert second.prompt_token_ids[: len(first.prompt_token_ids)] == first.prompt_token_ids


@pytest.mark.parametrize("group", [1, 3, 100])
def test_streamed_chat(served: Served, group: int) -> None:
    with served.saying(TEXT, group=group, num_cached_tokens=16):
        stream = served.sync.chat.completions.create(
            model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    *answer, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in answer) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in answer if chunk.choices[0].finish_reason] == ["stop"]
    assert answer[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in answer)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == len(served.ids(TEXT)) + 1
    assert last.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details.cached_tokens == 16


async def test_streamed_chat_async_without_usage(served: Served) -> None:
    with served.saying(TEXT):
        stream = await served.asynchronous().chat.completions.create(model="tiny", messages=HELLO, stream=True)
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert all(chunk.usage is None for chunk in chunks)


def test_no_chunk_is_empty(served: Served) -> None:
    with served.saying(TEXT):
        chunks = list(served.sync.chat.completions.create(model="tiny", messages=HELLO, stream=True))
    assert all(chunk.choices[0].delta.content for chunk in chunks[1:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_and_the_request(served: Served, stream: bool) -> None:
    with served.saying("one two three four five"):
        answer: Any = served.sync.chat.completions.create(
            model="tiny", messages=HELLO, stop=["zzz", "o three"], stream=stream
        )
        if stream:
            chunks = list(answer)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            finish_reason = chunks[-1].choices[0].finish_reason
        else:
            text, finish_reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert (text, finish_reason) == ("one tw", "stop")
    assert served.engine.aborted == [served.engine.requests[0].request_id]


def test_an_answer_that_ends_inside_a_character_ends_in_a_replacement_character(served: Served) -> None:
    served.engine.script = says(served.ids("x👨‍👩‍👧‍👦")[:2], finish_reason="length")
    answer = served.sync.chat.completions.create(model="tiny", messages=HELLO)
    assert answer.choices[0].message.content == "x\ufffd"


def test_what_the_engine_is_told(served: Served) -> None:
    with served.saying("ok"):
        served.sync.chat.completions.create(
            model="tiny",
            messages=HELLO,
            max_completion_tokens=5,
            temperature=0.25,
            top_p=0.5,
            seed=-3,
            user="u",
            metadata={"k": "v"},
            store=True,
            n=1,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={"7": 1.5},
            response_format={"type": "text"},
            extra_body={
                "top_k": 9,
                "stop_token_ids": [5, 6],
                "ignore_eos": True,
                "cache_salt": "pepper",
                "priority": -2,
                "min_p": 0.1,
                "repetition_penalty": 1.2,
                "allowed_token_ids": [7, 8],
                "min_tokens": 2,
            },
        )
    (request,) = served.engine.requests
    assert request.sampling_params == SamplingParams(
        temperature=0.25,
        top_k=9,
        top_p=0.5,
        seed=-3,
        max_tokens=5,
        stop_token_ids=(5, 6),
        ignore_eos=True,
        min_p=0.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.2,
        logit_bias={7: 1.5},
        allowed_token_ids=(7, 8),
        min_tokens=2,
    )
    assert request.extra_key_spans == (ExtraKeySpan(0, 1, "cache_salt", "pepper"),)
    assert request.priority == -2


def test_defaults_and_nulls_are_the_same(served: Served) -> None:
    with served.saying("ok"):
        served.sync.chat.completions.create(model="tiny", messages=HELLO)
        served.sync.chat.completions.create(
            model="tiny", messages=HELLO, temperature=None, top_p=None, stop=None, tools=None, extra_body={"top_k": -1}
        )
        served.sync.completions.create(model="tiny", prompt="x")
    chat, nulls, completion = served.engine.requests
    assert chat.sampling_params == nulls.sampling_params == SamplingParams()
    assert completion.sampling_params == SamplingParams(max_tokens=16)


def test_completion_of_one_prompt(served: Served) -> None:
    with served.saying(" there."):
        answer = served.sync.completions.create(model="tiny", prompt="Hello")
    assert answer.id.startswith("cmpl-")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" there.", "stop")
    assert served.engine.requests[0].prompt_token_ids == served.ids("Hello")


@pytest.mark.parametrize(
    ("prompt", "num_choices"), [(["a b", "c", "d e f"], 3), ([5, 6, 7], 1), ([[5, 6], [7]], 2), ("solo", 1)]
)
@pytest.mark.parametrize("stream", [False, True])
def test_every_prompt_of_a_completion_gets_its_choice_in_order(
    served: Served, prompt: Any, num_choices: int, stream: bool
) -> None:
    async def script(request: Any) -> Any:
        prompt_ids = request.prompt_token_ids
        async for output in says([*prompt_ids, served.eos], num_cached_tokens=len(prompt_ids) - 1)(request):
            yield output

    served.engine.script = script
    answer: Any = served.sync.completions.create(
        model="tiny", prompt=prompt, stream=stream, stream_options={"include_usage": True} if stream else openai.omit
    )
    texts = [""] * num_choices
    if stream:
        chunks = list(answer)
        usage = chunks[-1].usage
        for chunk in chunks[:-1]:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    else:
        usage = answer.usage
        texts = [choice.text for choice in answer.choices]
    prompts = sorted(served.engine.requests, key=lambda request: int(request.request_id.rpartition("-")[2]))
    assert texts == [served.tokenizer.backend.decode(request.prompt_token_ids) for request in prompts]
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - num_choices
    assert usage.prompt_tokens == sum(len(request.prompt_token_ids) for request in prompts)


def test_models(served: Served) -> None:
    assert [model.id for model in served.sync.models.list()] == ["tiny", "tiny-alias"]
    assert served.sync.models.retrieve("tiny-alias").id == "tiny-alias"
    with pytest.raises(openai.NotFoundError):
        served.sync.models.retrieve("other/model")


def test_an_unknown_model(served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        served.sync.chat.completions.create(model="gpt-9", messages=HELLO)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert "tiny" in caught.value.message


def test_a_bad_request(served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        served.sync.chat.completions.create(model="tiny", messages=HELLO, max_tokens=MAX_MODEL_LEN + 1)
    assert caught.value.param == "max_tokens"
    assert str(MAX_MODEL_LEN) in caught.value.message


@pytest.mark.parametrize("stream", [False, True])
def test_no_engine(served: Served, stream: bool) -> None:
    served.engine.state, served.engine.down_reason = "down", "the engine was silent for 4.2 s"
    with pytest.raises(openai.InternalServerError) as caught:
        served.sync.chat.completions.create(model="tiny", messages=HELLO, stream=stream)
    assert caught.value.status_code == 503
    assert "silent for 4.2 s" in caught.value.message
    assert int(caught.value.response.headers["retry-after"]) >= 1


def test_an_engine_lost_before_the_answer(served: Served) -> None:
    served.engine.script = fails_after([7, 8], EngineUnavailableError("lost"))
    with pytest.raises(openai.InternalServerError) as caught:
        served.sync.chat.completions.create(model="tiny", messages=HELLO)
    assert caught.value.status_code == 503


@pytest.mark.parametrize("api", ["chat", "completion", "completion of several"])
def test_an_engine_lost_in_a_stream_raises_in_the_client(served: Served, api: str) -> None:
    served.engine.script = fails_after(served.ids("one two"), EngineUnavailableError("lost"))
    stream: Any
    if api == "chat":
        stream = served.sync.chat.completions.create(model="tiny", messages=HELLO, stream=True)
    else:
        prompt: Any = "x" if api == "completion" else ["x", "y"]
        stream = served.sync.completions.create(model="tiny", prompt=prompt, stream=True)
    arrived: list[Any] = []
    with pytest.raises(openai.APIError, match="lost"):
        arrived.extend(stream)
    assert arrived


def test_an_unexpected_failure_is_ours(served: Served) -> None:
    served.engine.script = fails_after([], ZeroDivisionError())
    with pytest.raises(openai.InternalServerError) as caught:
        served.sync.chat.completions.create(model="tiny", messages=HELLO)
    assert caught.value.status_code == 500


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (RequestError("invalid", "the prompt needs 70 blocks, the pool has 64", "prompt_token_ids"), 400, "messages"),
        (RequestError("invalid", "seed is wrong", "seed"), 400, "seed"),
        (RequestError("invalid", "too many", "max_tokens"), 400, "max_completion_tokens"),
        (RequestError("overloaded", "too slow"), 503, None),
        (RequestError("internal", "a step failed"), 500, None),
    ],
)
def test_what_the_engine_refuses_names_the_clients_field(
    served: Served, error: RequestError, status: int, param: str | None, stream: bool
) -> None:
    served.engine.script = fails_after([], RequestRefusedError(error))
    with pytest.raises(openai.APIStatusError) as caught:
        served.sync.chat.completions.create(model="tiny", messages=HELLO, max_completion_tokens=3, stream=stream)
    assert (caught.value.status_code, caught.value.param) == (status, param)
    assert error.message in caught.value.message
