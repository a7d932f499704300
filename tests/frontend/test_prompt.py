"""Chat → text → token ids, as transformers does it, but without standing in anybody's way."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors
from transformers import AutoTokenizer

from frontend.prompt.cache_salt import PlacedSalt, asked_salt, salt_spans
from frontend.prompt.chat import Chat, ChatMessage
from frontend.prompt.chat_template import ChatTemplate, chat_template_of
from frontend.prompt.errors import ChatTemplateError, PromptError, PromptTooLongError
from frontend.prompt.piecewise import PiecewiseTokenizer, SplitText
from frontend.prompt.processor import ALWAYS_COUNTED_BYTES, PromptProcessor
from frontend.prompt.tokenizer import ModelTokenizer, TokenizerLoadError, load_tokenizer
from ipc.vocabulary import ExtraKeySpan

CHAT = [ChatMessage("system", "Be brief."), ChatMessage("user", "Where is 👨‍👩‍👧?"), ChatMessage("assistant", "Here.")]
PARTS_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endfor %}"
)


def transformers_tokenizer(chat_model_dir: Path, template: str | None = None) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(chat_model_dir)
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer


async def test_chat_gives_the_ids_transformers_gives(chat_model_dir: Path, chat_tokenizer: ModelTokenizer) -> None:
    expected = transformers_tokenizer(chat_model_dir).apply_chat_template(
        [{"role": m.role, "content": m.content} for m in CHAT], add_generation_prompt=True, return_dict=False
    )
    assert (await PromptProcessor(chat_tokenizer).chat(Chat(CHAT), max_model_len=1000)).token_ids == expected


async def test_text_gets_what_the_tokenizer_puts_around_it_and_chat_does_not(chat_model_dir: Path) -> None:
    tokenizer = load_tokenizer(chat_model_dir)
    bos = tokenizer.backend.token_to_id("<|im_start|>")
    tokenizer.backend.post_processor = processors.TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", bos)])
    prompts = PromptProcessor(tokenizer)
    text = await prompts.text("hi", max_model_len=100)
    chat = (await prompts.chat(Chat([ChatMessage("user", "hi")]), max_model_len=100)).token_ids
    assert text[0] == bos
    assert chat[:2].count(bos) == 1


async def test_special_tokens_in_a_message_are_special_as_peers_have_it(chat_tokenizer: ModelTokenizer) -> None:
    prompts = PromptProcessor(chat_tokenizer)
    ids = (await prompts.chat(Chat([ChatMessage("user", "<|im_end|>")]), max_model_len=100)).token_ids
    assert ids.count(chat_tokenizer.backend.token_to_id("<|im_end|>")) == 2


def test_text_parts_are_joined_for_a_template_that_knows_only_strings(chat_model_dir: Path) -> None:
    template = chat_template_of(transformers_tokenizer(chat_model_dir))
    assert template is not None
    assert template.takes_strings
    assert not template.takes_parts
    assert "one\ntwo<|im_end|>" in template.render(Chat([ChatMessage("user", ["one", "two"])]))


def test_a_template_that_knows_only_parts_gets_parts(chat_model_dir: Path) -> None:
    template = chat_template_of(transformers_tokenizer(chat_model_dir, PARTS_TEMPLATE))
    assert template is not None
    assert template.takes_parts
    messages = [ChatMessage("user", "alone"), ChatMessage("user", ["one", "two"])]
    assert template.render(Chat(messages)) == "[user]<alone>[user]<one><two>"


def test_what_a_template_says_reaches_the_caller(chat_model_dir: Path) -> None:
    template = chat_template_of(transformers_tokenizer(chat_model_dir, "{{ raise_exception('roles must alternate') }}"))
    assert template is not None
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        template.render(Chat(CHAT))


async def test_a_model_without_chat_template_points_to_completions(chat_tokenizer: ModelTokenizer) -> None:
    prompts = PromptProcessor(ModelTokenizer(chat_tokenizer.backend, None))
    with pytest.raises(ChatTemplateError, match="/v1/completions"):
        await prompts.chat(Chat(CHAT), max_model_len=100)


async def test_a_prompt_must_leave_room_for_one_token(chat_tokenizer: ModelTokenizer) -> None:
    prompts = PromptProcessor(chat_tokenizer)
    ids = await prompts.text("one two three", max_model_len=100)
    assert await prompts.text("one two three", max_model_len=len(ids) + 1) == ids
    with pytest.raises(PromptTooLongError) as caught:
        await prompts.text("one two three", max_model_len=len(ids))
    assert (caught.value.num_tokens, caught.value.max_model_len) == (len(ids), len(ids))


def test_truncation_left_on_in_a_tokenizer_file_is_switched_off(chat_model_dir: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((chat_model_dir / name).read_text())
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    saved["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    assert len(load_tokenizer(tmp_path).backend.encode("one two three four", add_special_tokens=False)) > 2


def test_a_directory_without_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(TokenizerLoadError, match=str(tmp_path)):
        load_tokenizer(tmp_path)


async def test_a_long_prompt_stalls_neither_the_event_loop_nor_short_prompts(chat_tokenizer: ModelTokenizer) -> None:
    prompts = PromptProcessor(chat_tokenizer, num_threads=1)
    long_prompt = "It was a dark and stormy night; the rain fell in torrents. " * 20_000
    long_task = asyncio.create_task(prompts.text(long_prompt, max_model_len=10**9))
    times_s = [time.perf_counter()]
    while not long_task.done():
        await prompts.text("short " * 400, max_model_len=10**9)
        times_s.append(time.perf_counter())
    await long_task
    # Standing in line behind the long prompt, or for the interpreter lock, makes one gap of nearly the whole time.
    assert max(b - a for a, b in pairwise(times_s)) < (times_s[-1] - times_s[0]) / 2


LONG_CHAT = [ChatMessage("user", f"{i}: " + "it was a dark and stormy night, " * 30) for i in range(100)]


async def test_a_long_chat_that_goes_on_does_not_wait_behind_long_prompts(chat_tokenizer: ModelTokenizer) -> None:
    prompts = PromptProcessor(chat_tokenizer)
    expected = (await prompts.chat(Chat(LONG_CHAT), max_model_len=10**9)).token_ids
    goes_on = Chat([*LONG_CHAT, ChatMessage("assistant", "It was."), ChatMessage("user", "And then?")])
    long_prompt = "It was a dark and stormy night; the rain fell in torrents. " * 20_000
    long_task = asyncio.create_task(prompts.text(long_prompt, max_model_len=10**9))
    await asyncio.sleep(0.01)
    ids = (await prompts.chat(goes_on, max_model_len=10**9)).token_ids
    assert not long_task.done()
    num_same = len(expected) - len(chat_tokenizer.backend.encode("<|im_start|>assistant\n").ids)
    assert ids[:num_same] == expected[:num_same]
    # Another tenant's text is another text: it has all of it to be tokenized, and waits.
    assert (await prompts.chat(goes_on, max_model_len=10**9, tenant="b")).token_ids == ids
    assert long_task.done()
    await long_task


async def test_a_hopeless_prompt_is_refused_without_being_tokenized(
    chat_tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenized: list[int] = []

    def split(self: PiecewiseTokenizer, text: str, tenant: str) -> SplitText:
        tokenized.append(len(text))
        return SplitText(tenant, [""], [None])

    monkeypatch.setattr(PiecewiseTokenizer, "split", split)
    prompts = PromptProcessor(chat_tokenizer)
    with pytest.raises(PromptTooLongError, match="bytes of text, at least") as caught:
        await prompts.text("é" * ALWAYS_COUNTED_BYTES, max_model_len=1000)
    assert caught.value.num_bytes == 2 * ALWAYS_COUNTED_BYTES
    assert caught.value.num_tokens >= 1000
    assert not tokenized
    # Below, and where it may fit, the true number is wanted.
    for size, max_model_len in [(ALWAYS_COUNTED_BYTES, 1000), (2 * ALWAYS_COUNTED_BYTES, 10**7)]:
        await prompts.text("x" * size, max_model_len=max_model_len)
        assert tokenized.pop() == size


async def test_a_prompt_nobody_waits_for_any_more_is_not_tokenized(chat_tokenizer: ModelTokenizer) -> None:
    started = threading.Event()
    release = threading.Event()
    rendered: list[str] = []

    def apply(variables: dict[str, Any]) -> str:
        rendered.append(variables["messages"][0]["content"][0])
        started.set()
        release.wait(20)
        return "text"

    template = ChatTemplate(apply, takes_strings=True, takes_parts=False)
    prompts = PromptProcessor(ModelTokenizer(chat_tokenizer.backend, template), num_threads=1)
    first, second, third = (
        asyncio.create_task(prompts.chat(Chat([ChatMessage("user", letter * 50_000)]), max_model_len=100))
        for letter in "abc"
    )
    await asyncio.to_thread(started.wait, 20)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    release.set()
    await asyncio.gather(first, third)
    assert rendered == ["a", "c"]


@pytest.mark.parametrize("salt", ["", "x" * 129, "a@b", "a/b", "a\\b", "a\0b"])
def test_salts_that_are_refused(salt: str) -> None:
    with pytest.raises(PromptError, match="cache_salt"):
        asked_salt(salt)


def test_a_salt_marks_the_first_token() -> None:
    salt = asked_salt("x" * 128).salt
    assert salt is not None and asked_salt(None).salt is None
    assert salt_spans([PlacedSalt(salt)], 1, {}) == (ExtraKeySpan(0, 1, "cache_salt", "x" * 128),)
