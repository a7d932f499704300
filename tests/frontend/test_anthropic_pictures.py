"""Pictures in messages, as the official Anthropic SDK sends them: the same prompts as through the OpenAI API."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from frontend.engine_errors import RequestRefusedError
from frontend.picture_config import PictureConfig
from ipc.vocabulary import EngineRequest, RequestError
from tests.frontend.anthropic_app import Served
from tests.frontend.picture_app import data_url, encoded, image, model_directory, picture_app, user
from tests.frontend.scripted_engine import ScriptedEngine, fails_after, says

RED, BLUE = encoded("red"), encoded("blue")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pictures")
    (directory / "blue.png").write_bytes(BLUE)
    return directory


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, pictures: Path) -> Iterator[Served]:
    directory = model_directory("qwen2_vl", tmp_path_factory.mktemp("models") / "qwen2_vl")
    engine = ScriptedEngine(says([]))
    config = PictureConfig(allowed_local_media_path=str(pictures), max_images_per_prompt=3)
    with picture_app(engine, directory, config) as (url, tokenizer):
        yield Served(engine, url, tokenizer)


@pytest.fixture(autouse=True)
def engine_is_fresh(served: Served) -> None:
    served.engine.requests.clear()
    served.engine.script = says(served.ids("fine"), finish_reason="length")


def picture(content: bytes, media_type: str = "image/png", **fields: Any) -> dict[str, Any]:
    source = {"type": "base64", "media_type": media_type, "data": base64.b64encode(content).decode()}
    return {"type": "image", "source": source, **fields}


def at(url: str) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "url", "url": url}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def same_by_the_other_api(served: Served, *messages: dict[str, Any]) -> EngineRequest:
    httpx.post(f"{served.url}/v1/chat/completions", json={"messages": list(messages)}, timeout=60).raise_for_status()
    return served.engine.requests[-1]


def test_pictures_stand_where_they_were_sent(served: Served, pictures: Path) -> None:
    served.create(
        messages=[
            {"role": "user", "content": [text("Compare "), picture(RED), text(" with ")]},
            {"role": "user", "content": [at(f"file://{pictures}/blue.png"), at(data_url(RED)), text(".")]},
        ],
        max_tokens=8,
    )
    asked = served.engine.requests[-1]
    other = same_by_the_other_api(served, user("Compare ", image(RED), " with ", image(BLUE), image(RED), "."))
    assert asked.prompt_token_ids == other.prompt_token_ids
    assert asked.mm_features == other.mm_features
    assert asked.extra_key_spans == other.extra_key_spans
    assert len(asked.mm_features) == 3


def test_pictures_are_counted(served: Served) -> None:
    asked = {"messages": [{"role": "user", "content": [picture(RED), text("?")]}]}
    assert served.count(**asked) == served.create(**asked, max_tokens=8).usage.input_tokens > 6


def refused(served: Served, *content: Any, system: Any = None) -> dict[str, Any]:
    messages = [{"role": "user", "content": "One."}, {"role": "user", "content": list(content)}]
    extra = {} if system is None else {"system": system}
    with pytest.raises(anthropic.BadRequestError) as caught:
        served.create(messages=messages, max_tokens=8, **extra)
    return caught.value.body["error"]  # type: ignore[index, no-any-return]


@pytest.mark.parametrize("bad", [picture(b"no picture"), at("https://example.org/a.png"), at("nonsense")])
def test_what_is_wrong_with_a_picture_names_its_block(served: Served, bad: dict[str, Any]) -> None:
    """Though in the chat that is made of it, this is another message."""
    error = refused(served, picture(RED), bad, system="Look.")
    assert error["details"]["param"] == "messages[1].content[1]"
    assert error["message"].startswith("messages[1].content[1]")


def test_too_many_pictures(served: Served) -> None:
    assert refused(served, *[picture(RED)] * 4)["details"]["param"] == "messages[1].content[3]"


def test_what_the_engine_refuses_of_a_picture_names_its_block(served: Served) -> None:
    error = RequestError("invalid", "mm_features[1] is too large", "mm_features[1]")
    served.engine.script = fails_after([], RequestRefusedError(error))
    assert refused(served, picture(RED), text("?"), picture(BLUE))["message"] == "messages[1].content[2] is too large"


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"messages": [{"role": "user", "content": "<|image_pad|>"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [text("a"), text("<|image_pad|>")]}]}, "messages[0].content[1]"),
        ({"system": "<|image_pad|>"}, "system"),
        ({"system": [text("a"), text("<|image_pad|>")]}, "system[1]"),
        ({"tools": [{"name": "f", "description": "<|image_pad|>", "input_schema": {}}]}, "tools[0].description"),
        ({"tools": [{"name": "f", "input_schema": {"x": "<|image_pad|>"}}]}, "tools[0].input_schema"),
        (
            {
                "messages": [
                    {"role": "user", "content": "?"},
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"x": "<|image_pad|>"}}],
                    },
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "ok"}]},
                ]
            },
            "messages[1].content[0].input",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "?"},
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "<|image_pad|>", "content": "ok"}],
                    },
                ]
            },
            "messages[2].content[0].tool_use_id",
        ),
    ],
)
def test_no_text_makes_a_picture(served: Served, asked: dict[str, Any], param: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        served.create(max_tokens=8, **asked)
    error = caught.value.body["error"]  # type: ignore[index]
    assert error["details"]["param"] == param
    assert error["message"].startswith(param)
    assert not served.engine.requests
