"""Chats with pictures over HTTP, with a tiny model's own processor: what the engine is asked, what clients are told."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from frontend.engine_errors import RequestRefusedError
from frontend.prompt.tokenizer import ModelTokenizer
from ipc.vocabulary import EngineRequest, ExtraKeySpan, RequestError, RequestOutput
from tests.frontend.picture_app import data_url, encoded, image, model_directory, picture_app, user
from tests.frontend.scripted_engine import ScriptedEngine, fails_after, says

CHAT = "/v1/chat/completions"
RED, BLUE = encoded("red"), encoded("blue")
IMAGE_TOKEN = "<|image_pad|>"


class Served:
    def __init__(self, engine: ScriptedEngine, url: str, tokenizer: ModelTokenizer) -> None:
        self.engine = engine
        self.url = url
        self.tokenizer = tokenizer
        self.http = httpx.Client(base_url=url, timeout=60)
        self.image_token_id: int = tokenizer.backend.token_to_id(IMAGE_TOKEN)

    def ask(self, *messages: dict[str, Any], **fields: Any) -> EngineRequest:
        """What the engine was asked."""
        response = self.http.post(CHAT, json={"messages": list(messages), **fields})
        assert response.status_code == 200, response.text
        return self.engine.requests[-1]

    def refused(self, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
        response = self.http.post(CHAT, json={"messages": list(messages), **fields})
        assert response.status_code == 400, response.text
        return response.json()["error"]  # type: ignore[no-any-return]

    def text(self, request: EngineRequest) -> str:
        """The prompt, each picture as one token."""
        places = {position for f in request.mm_features for position in range(f.start + 1, f.end)}
        ids = [token_id for position, token_id in enumerate(request.prompt_token_ids) if position not in places]
        return self.tokenizer.decode(ids)

    def metrics(self) -> dict[str, float]:
        lines = self.http.get("/metrics").text.splitlines()
        return {line.split("{")[0]: float(line.split()[-1]) for line in lines if not line.startswith("#")}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = model_directory("qwen2_vl", tmp_path_factory.mktemp("models") / "qwen2_vl")
    engine = ScriptedEngine(says([]))
    with picture_app(engine, directory) as (url, tokenizer):
        served = Served(engine, url, tokenizer)
        with served.http:
            yield served


@pytest.fixture(autouse=True)
def engine_is_fresh(served: Served) -> None:
    served.engine.requests.clear()
    served.engine.sources.clear()
    served.engine.script = says(
        served.tokenizer.backend.encode("fine", add_special_tokens=False).ids, finish_reason="length"
    )


def test_pictures_stand_where_they_were_sent(served: Served) -> None:
    request = served.ask(
        user("Compare ", image(RED), " with ", image(BLUE), "."),
        {"role": "assistant", "content": "The first one is red."},
        user(image(RED), "And this one?"),
    )
    shown = f"<|vision_start|>{IMAGE_TOKEN}<|vision_end|>"
    assert served.text(request) == (
        f"<|im_start|>user\nCompare {shown} with {shown}.<|im_end|>\n"
        "<|im_start|>assistant\nThe first one is red.<|im_end|>\n"
        f"<|im_start|>user\n{shown}And this one?<|im_end|>\n<|im_start|>assistant\n"
    )
    first, second, third = request.mm_features
    assert first.key == third.key != second.key
    # 40 × 24 pixels in patches of 4, merged by twos.
    assert [(f.num_tokens, f.embed_ranges, f.layout) for f in request.mm_features] == [
        (15, ((0, 15),), {"image_grid_thw": (1, 6, 10)})
    ] * 3
    for feature in request.mm_features:
        assert set(request.prompt_token_ids[feature.start : feature.end]) == {served.image_token_id}
    spans = request.extra_key_spans
    assert [(span.start, span.end, span.kind) for span in spans] == [
        (f.start, f.end, "mm") for f in (first, second, third)
    ]
    assert spans[0].key == spans[2].key != spans[1].key


def test_usage_and_tokenize_count_them(served: Served) -> None:
    messages = [user("one ", image(RED), image(BLUE))]
    answer = served.http.post(CHAT, json={"messages": messages}).json()
    (request,) = served.engine.requests
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(request.prompt_token_ids)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0, "image_tokens": 30}
    assert request.prompt_token_ids.count(served.image_token_id) == 30
    tokenized = served.http.post("/tokenize", json={"messages": messages}).json()
    assert tokenized["tokens"] == request.prompt_token_ids
    without = served.http.post(CHAT, json={"messages": [user("one ")]}).json()
    assert without["usage"]["prompt_tokens_details"]["image_tokens"] == 0


def test_the_same_picture_in_another_form_is_the_same_picture(served: Served) -> None:
    as_bmp = data_url(encoded("red", image_format="BMP"), "image/bmp")
    request = served.ask(user(image(RED), image(as_bmp), {"type": "image_url", "image_url": data_url(RED)}))
    assert len({feature.key for feature in request.mm_features}) == 1


def test_another_size_detail_or_setting_is_another_picture(served: Served) -> None:
    large = encoded("red", (600, 600))
    plain, low = served.ask(user(image(large), image(large, detail="low"))).mm_features
    assert plain.key != low.key
    (coarse,) = served.ask(
        user(image(large)), mm_processor_kwargs={"size": {"shortest_edge": 64, "longest_edge": 400}}
    ).mm_features
    assert coarse.num_tokens < plain.num_tokens
    high, auto = served.ask(user(image(large, detail="high"), image(large, detail="auto"))).mm_features
    assert high.key == auto.key == plain.key
    # What is small already is shown as it is.
    small, small_low = served.ask(user(image(RED), image(RED, detail="low"))).mm_features
    assert small.num_tokens == small_low.num_tokens


def test_a_tenants_picture_is_its_own(served: Served) -> None:
    asked = [served.ask(user(image(RED)), **salt) for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"})]
    assert len({request.mm_features[0].key for request in asked}) == 3
    # The salt is in the first block's hash already.
    assert len({request.extra_key_spans[-1].key for request in asked}) == 1
    assert asked[1].extra_key_spans[0] == ExtraKeySpan(0, 1, "cache_salt", "a")


def test_a_picture_that_has_a_name_need_not_be_sent_again(served: Served) -> None:
    named = image(RED) | {"uuid": "cat"}
    again = {"type": "image_url", "image_url": None, "uuid": "cat"}
    first, second = served.ask(user(named), {"role": "assistant", "content": "a cat"}, user(again)).mm_features
    assert first.key == second.key
    assert served.ask(user(again)).mm_features[0].key == first.key
    other_tenant = served.refused(user(again), cache_salt="other")
    assert other_tenant["param"] == "messages[0].content[0]"
    assert "send it again" in other_tenant["message"]
    assert "names another picture" in served.refused(user(image(BLUE) | {"uuid": "cat"}))["message"]


def test_the_engine_gets_what_the_processor_makes(served: Served) -> None:
    received: list[dict[str, np.ndarray]] = []

    async def asks(request: EngineRequest) -> AsyncGenerator[RequestOutput]:
        (source,) = served.engine.sources
        assert source is not None
        received.extend([dict(await source.inputs(feature.key)) for feature in request.mm_features])
        yield RequestOutput(request.request_id, [5], finish_reason="length")

    served.engine.script = asks
    before = served.metrics()
    request = served.ask(user(image(RED), image(BLUE), image(RED)))
    after = served.metrics()
    assert [sorted(inputs) for inputs in received] == [["image_grid_thw", "pixel_values"]] * 3
    for feature, inputs in zip(request.mm_features, received, strict=True):
        assert sum(array.nbytes for array in inputs.values()) == feature.num_input_bytes
        assert tuple(inputs["image_grid_thw"].ravel()) == feature.layout["image_grid_thw"]
    assert np.array_equal(received[0]["pixel_values"], received[2]["pixel_values"])
    assert not np.array_equal(received[0]["pixel_values"], received[1]["pixel_values"])

    def grown(name: str) -> float:
        return after[f"foreword:{name}_total"] - before[f"foreword:{name}_total"]

    assert grown("mm_cache_queries") == 3
    assert grown("mm_processor_calls") == 3 - grown("mm_cache_hits") <= 2
    assert grown("prompt_image_tokens") == 45
    assert grown("mm_file_queries") == 3


def test_a_picture_that_came_before_is_not_decoded_again(served: Served) -> None:
    picture = encoded((1, 2, 3), (24, 24))
    served.ask(user(image(picture)))
    before = served.metrics()
    served.ask(user(image(picture), "what?"), {"role": "assistant", "content": "dark"}, user("sure?"))
    after = served.metrics()
    assert after["foreword:mm_decodes_total"] == before["foreword:mm_decodes_total"]
    assert after["foreword:mm_file_hits_total"] == before["foreword:mm_file_hits_total"] + 1


def test_text_is_text(served: Served) -> None:
    said = f"this is no picture: {data_url(RED)} ![](https://example.org/cat.png)"
    request = served.ask(user(said, image(RED)))
    assert len(request.mm_features) == 1
    assert said in served.text(request)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"messages": [{"role": "user", "content": f"a {IMAGE_TOKEN}"}]}, "messages[0].content"),
        ({"messages": [user(image(RED), f"{IMAGE_TOKEN}")]}, "messages[0].content[1]"),
        ({"messages": [user("<|video_pad|>")]}, "messages[0].content[0]"),
        ({"messages": [user("<|image", "_pad|>")]}, "messages[0].content"),
        ({"messages": [user("hi")], "chat_template_kwargs": {"x": [IMAGE_TOKEN]}}, "chat_template_kwargs"),
    ],
)
def test_no_text_makes_a_picture(served: Served, fields: dict[str, Any], field: str) -> None:
    for path in (CHAT, "/tokenize"):
        response = served.http.post(path, json=fields)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == field
    assert not served.engine.requests


def test_tokenize_knows_a_tenants_pictures_alone(served: Served) -> None:
    named = {**image(RED), "uuid": "mine"}
    chat = {"messages": [user(named)], "cache_salt": "one"}
    assert served.http.post("/tokenize", json=chat).status_code == 200
    again = chat | {"messages": [user({**named, "image_url": None})]}
    assert served.http.post("/tokenize", json=again).status_code == 200
    for salt, field in (("two", "messages[0].content[0]"), (None, "messages[0].content[0]"), ("a/b", "cache_salt")):
        refused = served.http.post("/tokenize", json=again | {"cache_salt": salt})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)


def test_in_a_completion_the_image_token_is_a_token(served: Served) -> None:
    for prompt in ([5, served.image_token_id, 6], f"a{IMAGE_TOKEN}b"):
        assert served.http.post("/v1/completions", json={"prompt": prompt}).status_code == 200
        request = served.engine.requests[-1]
        assert served.image_token_id in request.prompt_token_ids
        assert not request.mm_features


def test_what_an_engine_has_against_a_picture_is_told(served: Served) -> None:
    refusal = RequestRefusedError(
        RequestError("invalid", "mm_features: too large for the encoder cache", "mm_features")
    )
    served.engine.script = fails_after([], refusal)
    error = served.refused(user(image(RED)))
    assert (error["param"], error["message"]) == ("messages", str(refusal))


def test_a_picture_that_an_engine_cannot_compute_is_named(served: Served) -> None:
    reason = RequestError("invalid", "mm_features[1]: the vision tower cannot compute it", "mm_features[1]")
    served.engine.script = fails_after([], RequestRefusedError(reason))
    error = served.refused(user(image(RED)), user("and", image(RED)))
    field = "messages[1].content[1]"
    assert (error["param"], error["message"]) == (field, f"{field}: the vision tower cannot compute it")


async def test_the_official_sdk(served: Served) -> None:
    client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0)
    messages: Any = [user("what is ", image(RED, detail="low"), "?")]
    answer = await client.chat.completions.create(model="tiny", messages=messages)
    assert answer.choices[0].message.content == "fine"
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    assert details is not None
    assert details.image_tokens == 15
    stream = await client.chat.completions.create(
        model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage == answer.usage
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model="tiny", messages=[user(image(b"<html>"))])  # type: ignore[list-item]
    assert refused.value.param == "messages[0].content[0]"
