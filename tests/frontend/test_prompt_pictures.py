"""A chat with pictures becomes the prompt that the model's own processor makes of it, in every family."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from frontend.feature_supply import FeatureError
from frontend.open_pictures import open_pictures
from frontend.picture_config import PictureConfig
from frontend.prompt.chat import Chat, ChatMessage, ChatPicture
from frontend.prompt.errors import PromptError, PromptTooLongError
from frontend.prompt.pictures import PictureInputs, before_what_it_decides
from frontend.prompt.places import MessagePlace, places_of
from frontend.prompt.processor import PromptProcessor
from frontend.prompt.prompt import num_image_tokens
from frontend.prompt.tokenizer import load_tokenizer
from ipc.vocabulary import ExtraKeySpan
from multimodal import PictureError
from multimodal.processor_loading import load_transformers_processor
from tests.frontend.picture_app import data_url, encoded, model_directory
from tests.tiny_vlm_processors import FAMILIES

SIZES = {"red": (40, 24), "blue": (24, 40), "green": (32, 32)}


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: root / family for family in FAMILIES}


@asynccontextmanager
async def prompts_of(directory: Path, **settings: Any) -> AsyncIterator[PromptProcessor]:
    pictures = open_pictures(directory, PictureConfig(**settings))
    assert pictures is not None
    prompts = PromptProcessor(load_tokenizer(directory, pictures.image_token), pictures)
    try:
        yield prompts
    finally:
        prompts.close()
        await pictures.close()


def picture(color: str, place: str = "messages[0].content[0]") -> ChatPicture:
    return ChatPicture(data_url(encoded(color, SIZES[color])), place)


def chat(*contents: list[Any]) -> Chat:
    """Turns of user and assistant; colours are pictures, all else is text."""
    messages = []
    for i, content in enumerate(contents):
        parts = [
            picture(part, f"messages[{i}].content[{j}]") if part in SIZES else part for j, part in enumerate(content)
        ]
        role = "user" if i % 2 == 0 else "assistant"
        messages.append(ChatMessage(role, parts if role == "user" else "".join(parts)))
    return Chat(messages)


def reference(directory: Path, asked: Chat) -> list[int]:
    """The token ids that transformers makes of the same chat."""
    processor: Any = load_transformers_processor(directory)
    colors = [color for p in asked.pictures for color in SIZES if p.url == picture(color).url]
    messages = [
        {
            "role": message.role,
            "content": message.content
            if isinstance(message.content, str)
            else [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in message.content],
        }
        for message in asked.messages
    ]
    text = processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    images = [Image.new("RGB", SIZES[color], color) for color in colors]
    return list(processor(text=[text], images=[images], add_special_tokens=False)["input_ids"][0])


@pytest.mark.parametrize("family", FAMILIES)
async def test_the_ids_are_those_of_the_models_processor(model_dirs: dict[str, Path], family: str) -> None:
    directory = model_directory(family, model_dirs[family])
    chats = [
        chat(["red", "what?"]),
        chat(["compare ", "red", "blue", " and ", "red"], ["the same"], ["green", "and this?"]),
    ]
    async with prompts_of(directory) as prompts:
        for asked in chats:
            prompt = await prompts.chat(asked, max_model_len=4096)
            assert prompt.token_ids == reference(directory, asked)
            assert len(prompt.features) == len(prompt.extra_key_spans) == len(asked.pictures)
            assert num_image_tokens(prompt.features) == sum(f.num_tokens for f in prompt.features) > 0
            assert prompt.inputs is not None
            for feature, span in zip(prompt.features, prompt.extra_key_spans, strict=True):
                assert span.start <= feature.start < feature.end <= (span.end or 0)
                inputs = await prompt.inputs.inputs(feature.key)
                assert sum(np.asarray(array).nbytes for array in inputs.values()) == feature.num_input_bytes
        keys = [feature.key for feature in prompt.features]
        assert keys[0] == keys[2]
        assert len(set(keys)) == 3


@pytest.mark.parametrize("family", FAMILIES)
async def test_places_are_found_around_pictures(model_dirs: dict[str, Path], family: str) -> None:
    directory = model_directory(family, model_dirs[family])
    asked = chat(["compare ", "red", "blue", " and ", "red"], ["the same"], ["green", "then this?"])
    other = chat(["compare ", "red", "green", "nothing"])
    async with prompts_of(directory) as prompts:
        prompt = await prompts.chat(asked, max_model_len=4096, places=places_of(asked))
        assert prompt.token_ids == (await prompts.chat(asked, max_model_len=4096)).token_ids
        for feature, (i, j) in zip(prompt.features, asked.picture_places, strict=True):
            _, shown, end = prompt.places[MessagePlace(i, j)]
            assert shown <= feature.start < feature.end <= end
            assert sum(shown <= other.start < end for other in prompt.features) == 1
        for i, j, text in [(0, 0, "compare"), (0, 3, "and"), (1, 0, "the same"), (2, 1, "then this?")]:
            _, shown, end = prompt.places[MessagePlace(i, j)]
            assert text in prompts.tokenizer.decode(prompt.token_ids[shown:end])
        place = MessagePlace(0, 2)
        elsewhere = await prompts.chat(other, max_model_len=4096, places=[place], bounds="start")
        start = min(prompt.places[place].start, elsewhere.places[place].start)
        assert prompt.token_ids[:start] == elsewhere.token_ids[:start]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("before", [["red"], ["red", "blue"], ["text", "red"]])
async def test_no_picture_before_a_place_depends_on_what_follows(
    model_dirs: dict[str, Path], family: str, before: list[str]
) -> None:
    """Neither what it becomes, which may be less in company, nor its K/V, where pictures that touch see each other."""
    directory = model_directory(family, model_dirs[family])
    place = MessagePlace(0, len(before))
    async with prompts_of(directory) as prompts:
        found = [
            await prompts.chat(chat([*before, *behind]), max_model_len=4096, places=[place])
            for behind in (["text"], ["green"], ["text", "green"])
        ]
    start = min(prompt.places[place].start for prompt in found)
    assert len({tuple(prompt.token_ids[:start]) for prompt in found}) == 1
    decided = {tuple(span for span in prompt.extra_key_spans if span.start < start) for prompt in found}
    assert len(decided) == 1
    assert all(span.end is not None and span.end <= start for spans in decided for span in spans)


@pytest.mark.parametrize(("start", "before"), [(2, 2), (3, 3), (4, 3), (6, 3), (7, 7), (9, 8), (20, 8)])
def test_nothing_begins_in_the_midst_of_what_pictures_decide(start: int, before: int) -> None:
    spans = [ExtraKeySpan(3, 7, "mm", "cat"), ExtraKeySpan(3, 7, "mm", "dog"), ExtraKeySpan(8, None, "mm", "bird")]
    assert before_what_it_decides(start, spans) == before


async def test_a_text_only_chat_of_such_a_model(model_dirs: dict[str, Path]) -> None:
    directory = model_directory("llava", model_dirs["llava"])
    async with prompts_of(directory) as prompts:
        prompt = await prompts.chat(chat(["hello"]), max_model_len=4096)
        assert (
            prompt.token_ids
            == prompts.tokenizer.backend.encode("<s>User: hello\nAssistant:", add_special_tokens=False).ids
        )
        assert (prompt.features, prompt.extra_key_spans, prompt.inputs) == ((), (), None)


async def test_errors_name_the_part(model_dirs: dict[str, Path]) -> None:
    directory = model_directory("llava", model_dirs["llava"])
    async with prompts_of(directory, max_images_per_prompt=3) as prompts:
        bad = ChatMessage("user", [picture("red"), ChatPicture("data:image/png;base64,AAAA", "messages[0].content[1]")])
        with pytest.raises(PromptError, match=r"^messages\[0\]\.content\[1\]: ") as refused:
            await prompts.chat(Chat([bad]), max_model_len=4096)
        assert refused.value.field == "messages[0].content[1]"
        with pytest.raises(PromptError, match="at most 3") as refused:
            await prompts.chat(chat(["red"] * 4), max_model_len=4096)
        assert refused.value.field == "messages[0].content[3]"
        num_tokens = len((await prompts.chat(chat(["red"]), max_model_len=4096)).token_ids)
        with pytest.raises(PromptTooLongError, match=str(num_tokens)):
            await prompts.chat(chat(["red"]), max_model_len=num_tokens)


async def test_inputs_are_only_those_of_the_prompt(model_dirs: dict[str, Path]) -> None:
    directory = model_directory("llava", model_dirs["llava"])
    async with prompts_of(directory) as prompts:
        prompt = await prompts.chat(chat(["red"]), max_model_len=4096)
        assert prompt.inputs is not None
        with pytest.raises(FeatureError) as refused:
            await prompt.inputs.inputs(b"x" * 32)
        assert refused.value.error.code == "internal"


async def test_a_picture_that_fails_when_it_is_wanted_is_its_senders_affair() -> None:
    class Maker:
        async def inputs(self, picture: Any) -> Any:
            raise PictureError("this model cannot take it", picture.where)

    wanted = SimpleNamespace(key=b"k" * 32, where="messages[0].content[1]")
    with pytest.raises(FeatureError) as refused:
        await PictureInputs(Maker(), [wanted]).inputs(wanted.key)  # type: ignore[arg-type, list-item]
    error = refused.value.error
    assert (error.code, error.param) == ("invalid", "messages[0].content[1]")
    assert error.message == "messages[0].content[1]: this model cannot take it"


async def test_who_gives_up_does_not_take_others_along(model_dirs: dict[str, Path]) -> None:
    directory = model_directory("llava", model_dirs["llava"])
    async with prompts_of(directory) as prompts:
        first = asyncio.create_task(prompts.chat(chat(["green"]), max_model_len=4096))
        second = asyncio.create_task(prompts.chat(chat(["green"]), max_model_len=4096))
        await asyncio.sleep(0)
        first.cancel()
        assert len((await second).features) == 1
        with pytest.raises(asyncio.CancelledError):
            await first
