"""From places in a text to the tokens actually sent, whatever the tokenizer does at their borders."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Encoding, Regex, normalizers

from frontend.prompt import piecewise
from frontend.prompt.chat import Chat, ChatMessage, Tool
from frontend.prompt.chat_template import chat_template_of
from frontend.prompt.cuts import cuts_of
from frontend.prompt.errors import PromptError
from frontend.prompt.piecewise import PiecewiseTokenizer, TokenOffsets, Tokens
from frontend.prompt.place_offsets import PlaceOffsets
from frontend.prompt.places import (
    MessagePlace,
    Place,
    ToolPlace,
    check_place,
    innermost,
    place_named,
    places_of,
)
from frontend.prompt.processor import PromptProcessor
from frontend.prompt.stable_tokens import StableTokens, stable_tokens_of
from frontend.prompt.tokenizer import ModelTokenizer
from tests.frontend.templates import TOOL_TEMPLATE, tokenizer_with
from tests.frontend.test_prompt_pieces import MAKERS, any_number, byte_level, texts_of, tokenizer_of

PIECE_CHARACTERS = 5


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piecewise, "MIN_PIECE_CHARACTERS", PIECE_CHARACTERS)


def tokens_of(tokenizer: PiecewiseTokenizer, text: str, *places: tuple[int, int], special: bool = False) -> Tokens:
    offsets = [PlaceOffsets(start, start, end) for start, end in places]
    return tokenizer.tokenize(
        tokenizer.split(text, ""), add_special_tokens=special, check_number=any_number, places=offsets
    )


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=30, suppress_health_check=list(HealthCheck), deadline=None)
@given(data=st.data())
def test_tokens_before_a_place_do_not_depend_on_what_follows(name: str, data: st.DataObject) -> None:
    tokenizer = PiecewiseTokenizer(tokenizer_of(name))
    texts = texts_of(name).map("".join)
    left, right, other = data.draw(texts), data.draw(texts), data.draw(texts)
    special = data.draw(st.booleans())
    found, elsewhere = (
        tokens_of(tokenizer, left + behind, (len(left), len(left + behind)), special=special)
        for behind in (right, other)
    )
    start = found.ranges[0].start
    assert start == elsewhere.ranges[0].start
    assert found.ids[:start] == elsewhere.ids[:start]
    assert start <= found.ranges[0].shown <= found.ranges[0].end <= len(found.ids)


@pytest.mark.parametrize("name", ["llama_3", "smollm2"])
@settings(max_examples=30, suppress_health_check=list(HealthCheck), deadline=None)
@given(data=st.data())
def test_a_place_has_the_tokens_that_show_it_and_no_other(name: str, data: st.DataObject) -> None:
    """Of tokenizers that spell every byte, so that the tokens tell it themselves."""
    backend = tokenizer_of(name)
    added = {i: len(token.content.encode()) for i, token in backend.get_added_tokens_decoder().items()}

    def num_bytes(token_id: int) -> int:
        return added.get(token_id) or len(backend.id_to_token(token_id))

    tokenizer = PiecewiseTokenizer(backend)
    before, place, behind = (data.draw(texts_of(name).map("".join)) for _ in range(3))
    offsets = len(before), len(before + place)
    for _ in range(2):  # then from what it remembers
        tokens = tokens_of(tokenizer, before + place + behind, offsets)
        ids, [(_, shown, end)] = tokens.ids, tokens.ranges
        assert ids == backend.encode(before + place + behind, add_special_tokens=False).ids
        ends = [*accumulate(map(num_bytes, ids), initial=0)]
        assume(ends[-1] == len((before + place + behind).encode()))  # some bytes have no token
        first, last = (len(part.encode()) for part in (before, before + place))
        assert shown == bisect_right(ends, first) - 1
        assert end == (bisect_left(ends, last) if place else shown)


@pytest.mark.parametrize(
    ("name", "left", "sure"),
    [
        # Up to a special token, then up to a word that is over.
        ("llama_3", "a<|end|>the ship", "a<|end|>the"),
        ("llama_3", "a<|end|>", "a<|end|>"),
        ("llama_3", "the ship\n\n", "the"),
        ("llama_3", "ship", ""),
        ("metaspace_first", "the  ship  ", "the  ship"),
        # Its vocabulary has tokens that go over the space behind an "e".
        ("metaspace_unsplit", "dog the ship", "dog"),
    ],
)
def test_how_far_tokens_are_sure(name: str, left: str, sure: str) -> None:
    tokenizer = tokenizer_of(name)
    assert left[: stable_tokens_of(tokenizer, cuts_of(tokenizer)).end(left + "s behind", len(left))] == sure


def test_an_added_token_that_goes_over_a_space_is_minded() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("the ship", normalized=False)])
    # A normalizer may make an "e" of other characters.
    assert stable_tokens_of(tokenizer, None) == StableTokens(None, None)
    tokenizer.normalizer = None
    assert stable_tokens_of(tokenizer, None) == StableTokens(None, frozenset("e"))


@pytest.mark.parametrize(
    ("pattern", "keeps"), [("the ship", False), (Regex("e.s"), False), ("''", True), (Regex(" {2,}"), True)]
)
def test_a_normalizer_that_may_look_behind_a_space_is_minded(pattern: str | Regex, keeps: bool) -> None:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Replace(pattern, "x")
    assert stable_tokens_of(tokenizer, None).goes_on == (frozenset() if keeps else None)


def test_nothing_is_sure_of_a_tokenizer_that_does_something_unknown() -> None:
    tokenizer = byte_level()
    tokenizer.encode_special_tokens = True
    [(start, shown, end)] = tokens_of(PiecewiseTokenizer(tokenizer), "the ship and the ship", (8, 16)).ranges
    ids = tokenizer.encode("the ship and the ship", add_special_tokens=False).ids
    assert start == 0
    assert "".join(map(tokenizer.id_to_token, ids[shown:end])) == "ĠandĠthe"


def test_where_tokens_are_is_remembered_for_its_tenant_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = PiecewiseTokenizer(tokenizer_of("byte_level"))
    read: list[int] = []

    def offsets(encoding: Encoding) -> TokenOffsets:
        read.append(len(encoding))
        return offsets_of(encoding)

    offsets_of = piecewise._offsets
    monkeypatch.setattr(piecewise, "_offsets", offsets)
    text = "<|start|>the ship and the page<|end|>"
    place = PlaceOffsets(13, 13, 20)
    ranges = []
    for tenant in ("a", "a", "b", "b"):
        split = tokenizer.split(text, tenant)
        ranges += tokenizer.tokenize(split, add_special_tokens=False, check_number=any_number, places=[place]).ranges
    assert len(read) == 2
    assert len({*ranges}) == 1


SYSTEM, USER, ANSWER = (
    ChatMessage(role, text)
    for role, text in [("system", "Keep the light. "), ("user", ["Where is", " the ship?"]), ("assistant", "There.")]
)


@pytest.fixture(scope="module")
def with_tools(chat_model_dir: Path, chat_tokenizer: ModelTokenizer) -> ModelTokenizer:
    return ModelTokenizer(chat_tokenizer.backend, chat_template_of(tokenizer_with(chat_model_dir, TOOL_TEMPLATE)))


async def test_a_chat_tells_the_tokens_of_its_places(with_tools: ModelTokenizer) -> None:
    prompts = PromptProcessor(with_tools)
    chat = Chat([SYSTEM, USER, ANSWER], [Tool("look"), Tool("light")])
    prompt = await prompts.chat(chat, max_model_len=1000, places=places_of(chat))
    assert prompt.token_ids == (await prompts.chat(chat, max_model_len=1000)).token_ids
    assert list(prompt.places) == places_of(chat)
    shown = {str(place): with_tools.decode(prompt.token_ids[t.shown : t.end]) for place, t in prompt.places.items()}
    assert shown["messages[0].content[0]"] == "Keep the light. "
    assert shown["messages[1]"] == "<|im_start|>user\nWhere is\n the ship?<|im_end|>\n"
    assert shown["messages[1].content[1]"].strip() == "the ship?"
    assert '"name": "light"' in shown["tools[1]"]
    before = {str(place): with_tools.decode(prompt.token_ids[: t.start]) for place, t in prompt.places.items()}
    assert before["messages[1]"].endswith('{"name": "light"}}<|im_end|>')
    assert before["messages[1].content[1]"].endswith("<|im_start|>user\nWhere")


async def test_a_prompt_tells_the_place_of_a_token(with_tools: ModelTokenizer) -> None:
    prompts = PromptProcessor(with_tools)
    chat = Chat([SYSTEM, USER, ANSWER], [Tool("look"), Tool("light")])
    prompt = await prompts.chat(chat, max_model_len=1000, places=places_of(chat))
    text = with_tools.decode(prompt.token_ids)

    def place_at(spelled: str) -> str:
        number = len(with_tools.backend.encode(text[: text.index(spelled)]).ids)
        return str(innermost(prompt.places, number))

    assert place_at("Keep") == "messages[0].content[0]"
    assert place_at("look") == "tools[0]"
    assert place_at('light"') == "tools[1]"
    assert place_at("<|im_start|>user") == "messages[1]"
    assert place_at("Where") == "messages[1].content[0]"
    assert place_at("There.") == "messages[2].content[0]"
    assert innermost(prompt.places, len(prompt.token_ids) - 1) is None  # where the assistant is to speak
    assert innermost({}, 0) is None


async def test_without_places_nothing_more_is_rendered(with_tools: ModelTokenizer) -> None:
    template = with_tools.chat_template
    assert template is not None
    rendered: list[int] = []

    def apply(variables: dict[str, Any]) -> str:
        rendered.append(len(variables["messages"]))
        return template.apply(variables)

    prompts = PromptProcessor(replace(with_tools, chat_template=replace(template, apply=apply)))
    chat = Chat([SYSTEM, USER, ANSWER])
    await prompts.chat(chat, max_model_len=1000)
    assert rendered == [3]
    await prompts.chat(chat, max_model_len=1000, places=[MessagePlace(2)])
    assert len(rendered) <= 2 + 5


@pytest.mark.parametrize("name", ["messages[0]", "messages[12].content[3]", "tools[0]"])
def test_places_are_spelled_as_fields_are(name: str) -> None:
    assert str(place_named(name, "from")) == name


NO_NAMES = "messages messages[-1] messages[1].content tools[0].x messages[9999999999] messages[١]".split()


@pytest.mark.parametrize("name", ["", "messages[ 1]", "messages[1]\n", *NO_NAMES])
def test_what_names_no_place_is_refused(name: str) -> None:
    with pytest.raises(PromptError, match="names no place") as refused:
        place_named(name, "cache_salt.from")
    assert refused.value.field == "cache_salt.from"


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (MessagePlace(3), r"names messages\[3\], but the number of messages is 3"),
        (MessagePlace(3, 0), r"names messages\[3\].content\[0\], but the number of messages is 3"),
        (MessagePlace(1, 2), r"but the number of parts in messages\[1\] is 2;"),
        (MessagePlace(0, 1), r"but the number of parts in messages\[0\] \(a string is one\) is 1;"),
        (ToolPlace(0), "but the number of tools is 0;"),
    ],
)
def test_a_place_that_a_chat_has_not_is_refused_with_the_true_number(place: Place, reason: str) -> None:
    chat = Chat([SYSTEM, USER, ANSWER])
    with pytest.raises(PromptError, match=reason):
        check_place(place, chat, "from")
    for there in places_of(chat):
        check_place(there, chat, "from")
