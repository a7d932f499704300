"""Which tokens of a prompt a place of its chat is, whatever the template does with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from engine_core import resolve_model
from frontend.prompt.canonical_json import JsonText
from frontend.prompt.chat import Chat, ChatMessage, ChatPicture, Tool, ToolCall
from frontend.prompt.chat_template import ChatTemplate, chat_template_of
from frontend.prompt.errors import ChatTemplateError
from frontend.prompt.place_offsets import PlaceOffsets, place_offsets
from frontend.prompt.places import (
    MessagePlace,
    Place,
    ToolPlace,
    parts_of,
    place_named,
    places_of,
)
from frontend.prompt.tokenizer import load_tokenizer
from tests.frontend.templates import DATED_TEMPLATE, TOOL_TEMPLATE, tokenizer_with
from tests.frontend.test_template_pictures import HOISTED, IN_PLACE, TOKEN
from tests.tiny_models import CHATML_TEMPLATE

# The system prompt stands in the first user turn; everything is trimmed; roles must alternate.
MERGING = """
{{- '<s>' }}
{%- set system = messages[0]['content'] + '\n\n' if messages[0]['role'] == 'system' else '' %}
{%- set others = messages[1:] if system else messages %}
{%- for message in others %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {{- '[' + message['role'] + '] ' + ((system if loop.first else '') + message['content']) | trim + ' [end]\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"""

# What an assistant thought is dropped once a user has spoken again.
REASONING = """
{%- set state = namespace(last_user=0) %}
{%- for message in messages if message['role'] == 'user' %}{% set state.last_user = loop.index0 %}{% endfor %}
{%- set users = namespace(number=0) %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{% set users.number = users.number + 1 %}{% endif %}
    {%- set content = message['content'] %}
    {%- if message['role'] == 'assistant' and users.number <= state.last_user %}
        {%- set content = content.split('</think>')[-1] %}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Tells first how many turns there are, and what the last one asks.
SUMMARY_FIRST = """
{{- messages | length }} turns, the last: {{ messages[-1]['content'] }}
{% for message in messages %}
{{ message['role'] }}: {{ message['content'] }}
{% endfor %}"""

# Tools stand before the last user turn, their number before all of them.
TOOLS_LATE = """
{%- for message in messages %}
    {%- if loop.last and tools %}{{ '[' ~ tools | length ~ ' tools: ' + tools | tojson(indent=1) + ']' }}{% endif %}
    {{- '[' + message['role'] + ']' }}
    {%- if message['content'] is string %}{{ message['content'] }}{% else %}
        {%- for part in message['content'] %}{{ part['text'] | trim + ' / ' }}{% endfor %}
    {%- endif %}
    {%- for call in message['tool_calls'] %}{{ call | tojson }}{% endfor %}
{%- endfor %}"""

SHOWS_ONLY_USERS = "{% for m in messages if m.role == 'user' %}<{{ m.content }}>{% endfor %}"
UPPER = "{% for m in messages %}{{ m.role | upper }}: {{ m.content | upper }}\n\n{% endfor %}"

TEMPLATES = {
    "chatml": CHATML_TEMPLATE,
    "tools": TOOL_TEMPLATE,
    "dated": DATED_TEMPLATE,
    "merging": MERGING,
    "reasoning": REASONING,
    "summary_first": SUMMARY_FIRST,
    "tools_late": TOOLS_LATE,
    "in_place": IN_PLACE,
    "hoisted": HOISTED,
    "only_users": SHOWS_ONLY_USERS,
    "upper": UPPER,
}
SCHEMA = JsonText('{"properties": {"p7": {"type": "string"}}, "type": "object"}', "")


@pytest.fixture(scope="module")
def template_of(chat_model_dir: Path) -> Callable[[str], ChatTemplate]:
    @cache
    def make(name: str) -> ChatTemplate:
        if name == "smollm2":
            model = load_tokenizer(resolve_model(name).path).chat_template
            assert model is not None
            return model
        template = chat_template_of(tokenizer_with(chat_model_dir, TEMPLATES[name]), image_token=TOKEN)
        assert template is not None
        return template

    return make


def spans_of(template: ChatTemplate, chat: Chat) -> tuple[str, dict[Place, PlaceOffsets]]:
    text, places = template.render(chat), places_of(chat)
    return text, dict(zip(places, place_offsets(template, chat, text, places), strict=True))


def shown(template: ChatTemplate, chat: Chat) -> dict[str, str]:
    text, spans = spans_of(template, chat)
    assert all(span.start <= span.shown <= span.end <= len(text) for span in spans.values())
    return {str(place): text[span.shown : span.end] for place, span in spans.items()}


def call(number: int) -> ToolCall:
    return ToolCall("callnumb" + str(number), "f", JsonText(f'{{"x": "w{number}"}}', ""))


SYSTEM, USER, ANSWER, NEXT = (
    ChatMessage(role, text)
    for role, text in [("system", "Be brief."), ("user", "Where?"), ("assistant", "There."), ("user", "And now?")]
)
CALLED = ChatMessage("assistant", "Look:", tool_calls=[call(1), call(2)])
RESULT = ChatMessage("tool", "Rain.", tool_call_id="callnumb1")


@pytest.mark.parametrize(
    ("name", "chat", "expected"),
    [
        (
            "chatml",
            Chat([SYSTEM, ChatMessage("user", ["One. ", " two "]), ANSWER, NEXT]),
            {
                "messages[0]": "<|im_start|>system\nBe brief.<|im_end|>\n",
                "messages[0].content[0]": "Be brief.",
                "messages[1]": "<|im_start|>user\nOne. \n two <|im_end|>\n",
                "messages[1].content[0]": "One. ",
                "messages[1].content[1]": " two ",
                "messages[2]": "<|im_start|>assistant\nThere.<|im_end|>\n",
                "messages[2].content[0]": "There.",
                "messages[3]": "<|im_start|>user\nAnd now?<|im_end|>\n",
                "messages[3].content[0]": "And now?",
            },
        ),
        (
            "tools",
            Chat([SYSTEM, USER, CALLED, RESULT], [Tool("f", "Says.", SCHEMA), Tool("g")]),
            {
                "tools[0]": '\nTools:\n{"type": "function", "function": {"name": "f", "description": "Says.",'
                ' "parameters": {"properties": {"p7": {"type": "string"}}, "type": "object"}}}',
                "tools[1]": '\n{"type": "function", "function": {"name": "g"}}',
                "messages[0].content[0]": "Be brief.",
                "messages[1]": "<|im_start|>user\nWhere?<|im_end|>\n",
                "messages[2]": '<|im_start|>assistant\nLook:\n<tool_call>\n{"name": "f", "arguments": {"x": "w1"}}\n'
                '</tool_call>\n<tool_call>\n{"name": "f", "arguments": {"x": "w2"}}\n</tool_call><|im_end|>\n',
                "messages[2].content[0]": "Look:",
                "messages[3]": "<|im_start|>user\n<tool_response>Rain.</tool_response><|im_end|>\n",
            },
        ),
        (
            "merging",
            Chat([ChatMessage("system", " Be brief. "), ChatMessage("user", " Where? "), ANSWER, NEXT]),
            {
                "messages[0].content[0]": "Be brief. ",
                "messages[1].content[0]": " Where?",
                "messages[2]": "[assistant] There. [end]\n",
                "messages[3].content[0]": "And now?",
            },
        ),
        # What comes later decides whether a thought is shown, so the next turn begins where it would be.
        (
            "reasoning",
            Chat([USER, ChatMessage("assistant", "<think>Hm.</think>There."), NEXT]),
            {
                "messages[1].content[0]": "There.",
                "messages[2]": "There.<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n",
            },
        ),
        (
            "only_users",
            Chat([USER, ChatMessage("assistant", "Hidden."), NEXT]),
            {"messages[1]": "", "messages[1].content[0]": "", "messages[2].content[0]": "And now?"},
        ),
        (
            "chatml",
            Chat([USER, ChatMessage("assistant", ""), ChatMessage("user", [])]),
            {
                "messages[1]": "<|im_start|>assistant\n<|im_end|>\n",
                "messages[1].content[0]": "",
                "messages[2]": "<|im_start|>user\n<|im_end|>\n",
            },
        ),
        (
            "chatml",
            Chat([USER, ANSWER], add_generation_prompt=False, continue_final_message=True),
            {"messages[1]": "<|im_start|>assistant\nThere.", "messages[1].content[0]": "There."},
        ),
        (
            "upper",
            Chat([USER, NEXT]),
            {"messages[0]": "USER: WHERE?\n\n", "messages[1].content[0]": "AND NOW?"},
        ),
        (
            "in_place",
            Chat([ChatMessage("user", ["a ", ChatPicture("", ""), ChatPicture("", ""), "b"]), ANSWER]),
            {
                "messages[0]": "[user]a <image><image>b",
                "messages[0].content[0]": "a ",
                "messages[0].content[1]": "<image>",
                "messages[0].content[2]": "<image>",
                "messages[0].content[3]": "b",
                "messages[1]": "[assistant]There.",
            },
        ),
        (
            "hoisted",
            Chat([ChatMessage("user", ["a ", ChatPicture("", ""), "b"])]),
            {
                "messages[0].content[0]": "a ",
                "messages[0].content[1]": "<image>",
                "messages[0].content[2]": "b",
            },
        ),
        (
            "tools_late",
            Chat([SYSTEM, USER, NEXT], [Tool("f"), Tool("g")]),
            {"messages[0].content[0]": "Be brief.", "messages[2].content[0]": "And now?"},
        ),
    ],
    ids=count(),
)  # fmt: skip
def test_places_are_found(
    template_of: Callable[[str], ChatTemplate], name: str, chat: Chat, expected: Mapping[str, str]
) -> None:
    found = shown(template_of(name), chat)
    assert {place: found[place] for place in expected} == expected


@pytest.mark.parametrize(
    ("name", "place", "before"),
    [
        ("chatml", "messages[1].content[0]", "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"),
        # It is the user's turn that shows the system prompt.
        ("merging", "messages[0].content[0]", "<s>"),
        ("merging", "messages[1].content[0]", "<s>[user] Be brief.\n\n"),
        # Another turn behind it would move the tools.
        ("tools_late", "messages[1].content[0]", "[system]Be brief.["),
        ("tools_late", "tools[0]", "[system]Be brief.["),
        # The number of tools depends on the last of them.
        ("tools_late", "tools[1]", "[system]Be brief.["),
        ("tools", "tools[1]", '<|im_start|>system\nBe brief.\nTools:\n{"type": "function", "function": {"name": "f"}}'),
        ("summary_first", "messages[1]", ""),
        ("hoisted", "messages[1].content[1]", "[system]Be brief.[user]"),
    ],
)
def test_nothing_that_depends_on_a_place_is_before_it(
    template_of: Callable[[str], ChatTemplate], name: str, place: str, before: str
) -> None:
    template = template_of(name)
    content = ["Where?", ChatPicture("", "")] if name == "hoisted" else "Where?"
    chat = Chat([SYSTEM, ChatMessage("user", content)], [Tool("f"), Tool("g")] if template.takes_tools else [])
    rendered = template.render(chat)
    [found] = place_offsets(template, chat, rendered, [place_named(place, "")])
    assert rendered[: found.start] == before


def test_what_another_role_would_change_is_behind_the_start(template_of: Callable[[str], ChatTemplate]) -> None:
    """Here the thought is shown, and without the last message it would be; a user in its place would hide it."""
    template = template_of("reasoning")
    chat = Chat([USER, ChatMessage("assistant", "<think>Hm.</think>There."), ANSWER])
    rendered = template.render(chat)
    [found] = place_offsets(template, chat, rendered, [MessagePlace(2)])
    assert rendered[: found.start].endswith("assistant\n")


WORDS = (
    "a",
    "ship",
    "the",
    "wind.",
    "12,",
    "Zoë's",
    "\n",
    "\n\n",
    "  ",
    "日本",
    "👩\u200d🚀",
    "<|im_end|>",
    "</think>",
    "<tool>",
    "#",
)
text = st.lists(st.sampled_from(WORDS), max_size=6).map(" ".join)
part = st.one_of(text, text.map(str.strip), st.text(max_size=5))


def messages(roles: Sequence[str], takes_parts: bool) -> st.SearchStrategy[list[ChatMessage]]:
    content = st.one_of(part, st.lists(part, max_size=3)) if takes_parts else part
    return st.lists(st.builds(ChatMessage, st.sampled_from(roles), content), min_size=1, max_size=4)


def alternating(chat: Sequence[ChatMessage]) -> list[ChatMessage]:
    system = [message for message in chat[:1] if message.role == "system"]
    others = chat[len(system) :]
    return system + [replace(message, role=("user", "assistant")[i % 2]) for i, message in enumerate(others)]


def tools(min_size: int) -> st.SearchStrategy[list[Tool]]:
    schema = st.one_of(st.none(), st.just(SCHEMA))
    tool = st.builds(Tool, st.sampled_from(["f", "ship", "g2"]), st.one_of(st.none(), part), schema)
    return st.lists(tool, min_size=min_size, max_size=3)


@st.composite
def chats_and_others(draw: st.DrawFn, template: ChatTemplate, alternates: bool) -> tuple[Chat, Chat, Place]:
    """A chat, another one that is the same before a place, and that place."""
    roles = ("system", "user", "assistant")
    first = draw(messages(roles, template.takes_parts))
    if alternates:
        first = alternating(first)
    shown_tools = draw(tools(0)) if template.takes_tools else []
    chat = Chat(first, shown_tools, add_generation_prompt=draw(st.booleans()))
    place = draw(st.sampled_from(places_of(chat)))
    later = draw(messages(roles, template.takes_parts))
    changes: dict[str, object] = {"add_generation_prompt": draw(st.booleans())}
    match place:
        case ToolPlace(tool):
            system = [message for message in first[:1] if message.role == "system"]
            others = [replace(message, role="user" if message.role == "system" else message.role) for message in later]
            assume(not (len(first) > 1 and system and first[1].role == "system"))
            changes |= {"tools": [*shown_tools[:tool], *draw(tools(1))], "messages": system + others}
        case MessagePlace(i, int(j)):
            content = first[i].content
            if isinstance(content, str):
                changed = replace(first[i], content=draw(part))
            else:
                changed = replace(first[i], content=[*content[:j], *draw(st.lists(part, min_size=1, max_size=2))])
            changes["messages"] = [*first[:i], changed, *draw(st.sampled_from([[], later]))]
        case MessagePlace(i):
            changes["messages"] = [*first[:i], *later]
    if alternates:
        changes["messages"] = alternating(changes["messages"])  # type: ignore[arg-type]
    return chat, replace(chat, **changes), place  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*TEMPLATES, "smollm2"])
@settings(max_examples=60, suppress_health_check=list(HealthCheck), deadline=None)
@given(data=st.data())
def test_what_is_before_a_place_does_not_depend_on_it(
    template_of: Callable[[str], ChatTemplate], name: str, data: st.DataObject
) -> None:
    template = template_of(name)
    chat, other, place = data.draw(chats_and_others(template, name == "merging"))
    try:
        text, other_text = template.render(chat), template.render(other)
    except ChatTemplateError:
        assume(False)
    [span] = place_offsets(template, chat, text, [place])
    [other_span] = place_offsets(template, other, other_text, [place])
    [only_start] = place_offsets(template, chat, text, [place], "start")
    [only_end] = place_offsets(template, chat, text, [place], "end")
    assert only_start == (span.start, 0, len(text))
    assert only_end == (0, 0, max(only_end.end, 0)) and only_end.end <= span.end
    start = min(span.start, other_span.start)
    assert text[:start] == other_text[:start]
    assert span.start <= span.shown <= span.end <= len(text)


@pytest.mark.parametrize("name", sorted({*TEMPLATES, "smollm2"} - {"only_users"}))
@settings(max_examples=30, suppress_health_check=list(HealthCheck), deadline=None)
@given(data=st.data())
def test_all_of_a_place_is_before_its_end(
    template_of: Callable[[str], ChatTemplate], name: str, data: st.DataObject
) -> None:
    """Every place holds a word of its own, which stands before its end, and those of the places behind it do not."""
    template = template_of(name)
    words = (f"word{number}w" for number in count(10))
    padded = st.builds(
        "{}{}{}".format,
        st.sampled_from(["", " ", "\n"]),
        st.builds(lambda: next(words)),
        st.sampled_from(["", " ", "!\n"]),
    )
    content = st.one_of(padded, st.lists(padded, min_size=1, max_size=3)) if template.takes_parts else padded
    roles = ("system", "user", "assistant") if name != "merging" else ("user", "assistant")
    chat = Chat(
        alternating(
            data.draw(st.lists(st.builds(ChatMessage, st.sampled_from(roles), content), min_size=1, max_size=4))
        )
    )
    if template.takes_tools:
        chat = replace(chat, tools=[Tool(next(words), "d", SCHEMA) for _ in range(data.draw(st.integers(0, 3)))])
    rendered, spans = spans_of(template, chat)
    shown_at = rendered.upper()

    def ends(place: Place) -> list[int]:
        match place:
            case ToolPlace(tool):
                texts = [chat.tools[tool].name]
            case MessagePlace(i, int(j)):
                texts = [parts_of(chat.messages[i])[j]]
            case MessagePlace(i):
                texts = list(parts_of(chat.messages[i]))
        return [shown_at.rindex(word.upper()) + len(word) for each in texts for word in str(each).split()]

    in_order = [
        (place, span) for place, span in spans.items() if not isinstance(place, MessagePlace) or place.part is not None
    ]
    for place, span in spans.items():
        assert span.end >= max(ends(place))
    for place, span in in_order:
        behind = [min(ends(other)) for other, _ in in_order if min(ends(other)) > max(ends(place))]
        assert not behind or span.end < min(behind)
