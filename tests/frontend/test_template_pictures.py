"""Pictures in chat templates: each is shown once, in its place or the place the template has for it, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from frontend.prompt.canonical_json import JsonText
from frontend.prompt.chat import Chat, ChatMessage, ChatPicture, Tool, ToolCall
from frontend.prompt.chat_template import ChatTemplate, chat_template_of
from frontend.prompt.errors import ChatTemplateError, PromptError
from frontend.prompt.spellings import refuse_spellings
from tests.frontend.templates import TOOL_TEMPLATE, tokenizer_with
from tests.tiny_models import CHATML_TEMPLATE

TOKEN = "<image>"

# What a model's template does with the parts of a message.
IN_PLACE = """
{%- for message in messages %}{{ '[' + message['role'] + ']' }}
    {%- for part in message['content'] %}
        {%- if part['type'] == 'image' %}{{ '<image>' }}{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}
    {%- endfor %}
{%- endfor %}"""
BY_URL = IN_PLACE.replace("'image' %}{{", "'image_url' %}{{")
HOISTED = """
{%- for message in messages %}{{ '[' + message['role'] + ']' }}
    {%- if message['content'] is string %}{{ message['content'] }}{% else %}
        {%- for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}
        {%- for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}
    {%- endif %}
{%- endfor %}"""
ONLY_TEXT_PARTS = IN_PLACE.replace("part['type'] == 'image'", "false")
ONLY_USERS = IN_PLACE.replace("part['type'] == 'image'", "part['type'] == 'image' and message['role'] == 'user'")


@pytest.fixture(scope="module")
def template_of(chat_model_dir: Path) -> Callable[..., ChatTemplate]:
    def make(source: str, image_token: str | None = TOKEN) -> ChatTemplate:
        template = chat_template_of(tokenizer_with(chat_model_dir, source), image_token=image_token)
        assert template is not None
        return template

    return make


def picture(i: int, j: int) -> ChatPicture:
    return ChatPicture("data:,", f"messages[{i}].content[{j}]")


TWO = Chat(
    [
        ChatMessage("user", ["before ", picture(0, 1), " between ", picture(0, 3), " behind"]),
        ChatMessage("assistant", "a cat and a dog"),
        ChatMessage("user", [picture(2, 0), "and this?"]),
    ]
)


@pytest.mark.parametrize(
    ("source", "rendered"),
    [
        (IN_PLACE, "[user]before <image> between <image> behind[assistant]a cat and a dog[user]<image>and this?"),
        (BY_URL, "[user]before <image> between <image> behind[assistant]a cat and a dog[user]<image>and this?"),
        (HOISTED, "[user]<image>\n<image>\nbefore  between  behind[assistant]a cat and a dog[user]<image>\nand this?"),
        # No part of theirs shows a picture: the token stands in the text.
        (
            ONLY_TEXT_PARTS,
            "[user]before <image> between <image> behind[assistant]a cat and a dog[user]<image>and this?",
        ),
    ],
    ids=["in-place", "by-url", "hoisted", "only-text-parts"],
)
def test_every_picture_is_shown_once(template_of: Callable[..., ChatTemplate], source: str, rendered: str) -> None:
    assert template_of(source).render(TWO) == rendered


def test_a_template_that_knows_only_strings_gets_the_token_in_the_text(
    template_of: Callable[..., ChatTemplate],
) -> None:
    text = template_of(CHATML_TEMPLATE).render(TWO)
    assert text.startswith("<|im_start|>user\nbefore \n<image>\n between \n<image>\n behind<|im_end|>")
    assert "<|im_start|>user\n<image>\nand this?<|im_end|>" in text


def test_a_chat_without_pictures_is_rendered_as_without_an_image_token(
    template_of: Callable[..., ChatTemplate],
) -> None:
    chat = Chat([ChatMessage("user", ["one", "two"]), ChatMessage("assistant", "three"), ChatMessage("user", "four")])
    for source in (IN_PLACE, HOISTED, CHATML_TEMPLATE):
        assert template_of(source).render(chat) == template_of(source, None).render(chat)


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_a_picture_that_would_be_left_out_is_refused_by_its_place(
    template_of: Callable[..., ChatTemplate], role: str
) -> None:
    shown = ChatMessage("user", [picture(0, 0), "look"])
    hidden = ChatMessage(role, ["text", picture(1, 1)])
    template = template_of(ONLY_USERS)
    with pytest.raises(ChatTemplateError, match="does not show a picture in this place") as refused:
        template.render(Chat([shown, hidden, ChatMessage("user", [picture(2, 0)])]))
    assert refused.value.field == "messages[1].content[1]"
    assert template.render(Chat([shown])).count(TOKEN) == 1


def test_a_model_without_pictures_refuses_them(template_of: Callable[..., ChatTemplate]) -> None:
    with pytest.raises(ChatTemplateError, match="takes no pictures") as refused:
        template_of(IN_PLACE, None).render(TWO)
    assert refused.value.field == "messages[0].content[1]"


def test_parts_that_together_spell_the_token_make_no_picture(template_of: Callable[..., ChatTemplate]) -> None:
    for content in (["<ima", "ge>"], [picture(0, 0), "<im", "age>"]):
        with pytest.raises(ChatTemplateError, match="no text may spell it"):
            template_of(IN_PLACE).render(Chat([ChatMessage("user", content)]))


@pytest.mark.parametrize(
    ("content", "ends"),
    [
        ([picture(0, 0), "It is a"], "<image>It is a"),
        (["Look: ", picture(0, 1)], "Look: <image>"),
        ([picture(0, 0)], "<image>"),
    ],
)
def test_a_message_with_pictures_is_continued(
    template_of: Callable[..., ChatTemplate], content: list[str | ChatPicture], ends: str
) -> None:
    chat = Chat([ChatMessage("user", content)], add_generation_prompt=False, continue_final_message=True)
    assert template_of(IN_PLACE).render(chat) == f"[user]{ends}"
    assert template_of(CHATML_TEMPLATE).render(chat).replace("\n", "").endswith(ends)


def json(text: str, field: str) -> JsonText:
    return JsonText(text, field)


CALL = "messages[0].tool_calls[0]"
SPELLED: list[tuple[Chat, str]] = [
    (Chat([ChatMessage("user", "see <image>!")]), "messages[0].content"),
    (Chat([ChatMessage("user", ["x", picture(0, 1), "<|video_pad|>"])]), "messages[0].content[2]"),
    (Chat([ChatMessage("user", ["<im", "a", picture(0, 2), "ge>"])]), "messages[0].content"),
    (Chat([ChatMessage("user", "x", name="<image>")]), "messages[0].name"),
    (Chat([ChatMessage("tool", "x", tool_call_id="<image>")]), "messages[0].tool_call_id"),
    (
        Chat([ChatMessage("assistant", "", tool_calls=[ToolCall("1", "f", json('{"a": ["<image>"]}', "args"))])]),
        "args",
    ),
    (Chat([ChatMessage("assistant", "", tool_calls=[ToolCall("<image>", "f", json("{}", ""))])]), f"{CALL}.id"),
    (
        Chat([ChatMessage("assistant", "", tool_calls=[ToolCall("1", "<image>", json("{}", ""))])]),
        f"{CALL}.function.name",
    ),
    (Chat([], [Tool("<image>")]), "tools[0].function.name"),
    (Chat([], [Tool("f", "draws an <image>")]), "tools[0].function.description"),
    # However the JSON spells it.
    (Chat([], [Tool("f", None, json('{"\\u003cimage>": 1}', "schema"))]), "schema"),
    (Chat([], variables=json('{"x": {"y": "\\u003c\\u0069mage\\u003e"}}', "kwargs")), "kwargs"),
]  # fmt: skip


@pytest.mark.parametrize(("chat", "field"), SPELLED, ids=[f"{n} {field}" for n, (_, field) in enumerate(SPELLED)])
def test_no_text_may_spell_what_stands_for_a_picture(chat: Chat, field: str) -> None:
    with pytest.raises(PromptError, match="stands for a picture") as refused:
        refuse_spellings(chat, (TOKEN, "<|video_pad|>"))
    assert refused.value.field == field


def test_text_that_only_looks_like_it_is_text() -> None:
    texts = ["< image>", "<Image>", "data:image/png;base64,iVBORw0KGgo=", "<img src='x.png'>"]
    call = ToolCall("1", "f", json('{"url": "data:image/png;base64,AA=="}', ""))
    chat = Chat(
        [ChatMessage("user", texts), ChatMessage("assistant", "", tool_calls=[call])],
        [Tool("f", "an image", json('{"type": "object"}', ""))],
        variables=json('{"deep": [[[["x"]]]]}', ""),
    )
    refuse_spellings(chat, (TOKEN,))


def test_tools_and_pictures_go_together(template_of: Callable[..., ChatTemplate]) -> None:
    template = template_of(TOOL_TEMPLATE)
    chat = Chat([ChatMessage("user", [picture(0, 0), "what?"])], [Tool("look")])
    assert "<|im_start|>user\n<image>\nwhat?<|im_end|>" in template.render(chat)
