"""Chat templates: rendered as transformers does it; equal chats give equal prompts; nothing is left out silently."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.prompt.canonical_json import JsonText, canonical_object
from frontend.prompt.chat import Chat, ChatMessage, Tool, ToolCall
from frontend.prompt.chat_template import RESERVED_VARIABLES, ChatTemplate, chat_template_of
from frontend.prompt.errors import ChatTemplateError, PromptError
from frontend.prompt.template_program import utc_now
from frontend.prompt.tokenizer import TokenizerLoadError, load_tokenizer
from tests.frontend.templates import DATED_TEMPLATE, TOOL_TEMPLATE, tokenizer_with
from tests.tiny_models import CHATML_TEMPLATE

SCHEMA = {"properties": {"city": {"type": "string"}, "days": {"maximum": 7, "type": "integer"}}, "type": "object"}
WEATHER = Tool("weather", "Tell the weather.", JsonText(json.dumps(SCHEMA), "tools[0].function.parameters"))
CLOCK = Tool("clock")
USER = ChatMessage("user", "How will it be?")


def asked(arguments: str, content: str = "") -> Chat:
    call = ToolCall("call_1", "weather", JsonText(arguments, "messages[1].tool_calls[0].function.arguments"))
    answer = ChatMessage("assistant", content, tool_calls=[call])
    return Chat([USER, answer, ChatMessage("tool", "Rain.", tool_call_id="call_1")], [WEATHER])


def variables(text: str) -> Chat:
    return Chat([USER], variables=JsonText(text, "chat_template_kwargs"))


@pytest.fixture(scope="module")
def template_of(chat_model_dir: Path) -> Callable[..., ChatTemplate]:
    def make(source: str | dict[str, str], now: Callable[[], datetime] = utc_now) -> ChatTemplate:
        template = chat_template_of(tokenizer_with(chat_model_dir, source), now)
        assert template is not None
        return template

    return make


TOOL_DICT = {
    "type": "function",
    "function": {"name": "weather", "description": "Tell the weather.", "parameters": SCHEMA},
}
AS_TRANSFORMERS_TAKES_THEM: list[tuple[Chat, dict[str, Any]]] = [
    (Chat([USER]), {"add_generation_prompt": True}),
    (Chat([USER], add_generation_prompt=False), {}),
    (Chat([USER, ChatMessage("assistant", "Let me ")], add_generation_prompt=False, continue_final_message=True),
     {"continue_final_message": True}),
    (Chat([USER], [WEATHER]), {"tools": [TOOL_DICT], "add_generation_prompt": True}),
    (asked('{"city": "Ulm", "days": 2}', "Well:"), {"tools": [TOOL_DICT], "add_generation_prompt": True}),
    (variables('{"enable_thinking": false}'), {"enable_thinking": False, "add_generation_prompt": True}),
    (variables('{"date_string": "1 May"}'), {"date_string": "1 May", "add_generation_prompt": True}),
]  # fmt: skip


@pytest.mark.parametrize("source", [TOOL_TEMPLATE, DATED_TEMPLATE, CHATML_TEMPLATE], ids=["tools", "dated", "chatml"])
@pytest.mark.parametrize(("chat", "arguments"), AS_TRANSFORMERS_TAKES_THEM)
def test_what_transformers_renders_is_rendered(
    chat_model_dir: Path, source: str, chat: Chat, arguments: dict[str, Any]
) -> None:
    tokenizer = tokenizer_with(chat_model_dir, source.replace("%H:%M:%S.%f", ""))
    template = chat_template_of(tokenizer, datetime.now)
    assert template is not None
    if chat.tools and source != TOOL_TEMPLATE:
        with pytest.raises(ChatTemplateError, match="does not show"):
            template.render(chat)
        return
    messages: list[dict[str, Any]] = [{"role": m.role, "content": m.content} for m in chat.messages]
    for message, asked_for in zip(messages, chat.messages, strict=True):
        if asked_for.tool_calls:
            call = {"name": "weather", "arguments": json.loads(asked_for.tool_calls[0].arguments.text)}
            message["tool_calls"] = [{"id": "call_1", "type": "function", "function": call}]
    assert template.render(chat) == tokenizer.apply_chat_template(messages, tokenize=False, **arguments)


def test_tools_are_rendered_alike_whatever_the_order_of_their_keys(template_of: Callable[..., ChatTemplate]) -> None:
    template = template_of(TOOL_TEMPLATE)

    def rendered(schema: str, arguments: str) -> str:
        chat = asked(arguments)
        return template.render(Chat(chat.messages, [Tool("weather", None, JsonText(schema, "")), CLOCK]))

    one = rendered(
        '{"type":"object","properties":{"b":{"type":"integer"},"a":{"enum":[2,1]}}}', '{"b":1,"a":{"d":0,"c":1}}'
    )
    other = rendered(
        '{ "properties": {"a": {"enum": [2, 1]}, "b": {"type": "integer"}}, "type": "object" }',
        '{"a": {"c": 1, "d": 0}, "b": 1}',
    )
    assert one == other
    assert '{"a": {"c": 1, "d": 0}, "b": 1}' in one
    # What models were trained on comes first; the schema is sorted.
    assert '{"type": "function", "function": {"name": "weather", "parameters": {"properties": {"a": ' in one


def test_the_order_of_the_tools_is_the_callers(template_of: Callable[..., ChatTemplate]) -> None:
    template = template_of(TOOL_TEMPLATE)
    texts = [template.render(Chat([USER], tools)) for tools in ([WEATHER, CLOCK], [CLOCK, WEATHER])]
    assert [text.index("weather") < text.index("clock") for text in texts] == [True, False]


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ('{"b": 1, "a": 1.0, "B": -0.0}', '{"B": -0.0, "a": 1.0, "b": 1}'),
        ('{"n": 123456789012345678901234567890, "m": -9223372036854775809}',
         '{"m": -9223372036854775809, "n": 123456789012345678901234567890}'),
        ('{"x": 1E2, "y": 0.10, "z": 1e-7}', '{"x": 100.0, "y": 0.1, "z": 1e-07}'),
        ('{"a": 1, "b": 2, "a": 3}', '{"a": 3, "b": 2}'),
        ('{"\\u00e9": "\\ud83d\\ude00", "e\\u0301": "\\u0000"}', '{"e\u0301": "\\u0000", "é": "😀"}'),
        ('{"l": [{"y": 1, "x": 2}, 3, 1, null, true]}', '{"l": [{"x": 2, "y": 1}, 3, 1, null, true]}'),
        (" {\n} ", "{}"),
    ],
)  # fmt: skip
def test_canonical_json(text: str, canonical: str) -> None:
    assert json.dumps(canonical_object(JsonText(text, "")), ensure_ascii=False) == canonical


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda below: st.lists(below, max_size=4) | st.dictionaries(st.text(), below, max_size=4),
    max_leaves=12,
)


@given(value=st.dictionaries(st.text(), JSON_VALUES, max_size=4), random=st.randoms())
def test_the_order_of_keys_is_all_that_canonical_json_changes(value: dict[str, Any], random: Random) -> None:
    def shuffled(node: Any) -> Any:
        if isinstance(node, list):
            return [shuffled(item) for item in node]
        if isinstance(node, dict):
            return {key: shuffled(node[key]) for key in random.sample(sorted(node), len(node))}
        return node

    canonical = canonical_object(JsonText(json.dumps(value), ""))
    other = canonical_object(JsonText(json.dumps(shuffled(value), ensure_ascii=False, indent=1), ""))
    assert json.dumps(other) == json.dumps(canonical)
    assert json.dumps(canonical, sort_keys=True) == json.dumps(value, sort_keys=True)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("{'a': 1}", "not valid JSON"),
        ('{"a": NaN}', "not valid JSON"),
        ('{"a": 1e400}', "not valid JSON: Number out of range"),
        ('{"a": "\\ud83d"}', "not valid JSON"),
        (b'{"a": "\xff"}', "not valid JSON"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
        ("[1]", "must hold a JSON object, got an array"),
        ("null", "must hold a JSON object, got null"),
        ("1.5", "must hold a JSON object, got a number"),
        ('"x"', "must hold a JSON object, got a string"),
        ("true", "must hold a JSON object, got a boolean"),
    ],
)
def test_what_is_no_json_object_is_refused_by_name(text: str | bytes, reason: str) -> None:
    with pytest.raises(PromptError, match=re.escape(f"the_field is {reason}") + f"|the_field {reason}") as caught:
        canonical_object(JsonText(text, "the_field"))
    assert caught.value.field == "the_field"


def test_what_a_template_would_leave_out_is_refused(template_of: Callable[..., ChatTemplate]) -> None:
    template = template_of(CHATML_TEMPLATE)
    assert not template.takes_tools and not template.takes_tool_calls
    history = asked("{}").messages
    for chat, field in [
        (Chat([USER], [WEATHER]), "tools"),
        (Chat(history), "messages[1].tool_calls"),
        (Chat(history[2:]), "messages[0].role"),
    ]:
        with pytest.raises(ChatTemplateError, match="does not show") as caught:
            template.render(chat)
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("source", "tagged"),
    [
        (TOOL_TEMPLATE, True),
        (TOOL_TEMPLATE.replace("\\n<", "<").replace(">\\n", ">"), True),
        ({"default": CHATML_TEMPLATE, "tool_use": TOOL_TEMPLATE}, True),
        (TOOL_TEMPLATE.replace("<tool_call>", "[call]"), False),
        (TOOL_TEMPLATE.replace('"name"', '"function"'), False),
        (TOOL_TEMPLATE.replace("(call.function.arguments | tojson)", "(call.function.arguments | string)"), False),
        # It tells the model about tags, and shows calls in another way.
        (
            TOOL_TEMPLATE.replace("<tool_call>", "[call]").replace("Tools:", '<tool_call>{"name": NAME}</tool_call>'),
            False,
        ),
        (CHATML_TEMPLATE, False),
    ],
)
def test_how_a_model_writes_calls_is_learnt_from_its_template(
    template_of: Callable[..., ChatTemplate], source: str | dict[str, str], tagged: bool
) -> None:
    assert template_of(source).tags_tool_calls is tagged


def test_a_template_of_its_own_for_tools_is_used_for_them(template_of: Callable[..., ChatTemplate]) -> None:
    template = template_of({"default": CHATML_TEMPLATE, "tool_use": TOOL_TEMPLATE})
    assert template.takes_tools and template.takes_tool_calls
    assert "Tools:" in template.render(Chat([USER], [WEATHER]))
    assert "<tool_call>" in template.render(Chat(asked("{}").messages))
    assert template.render(Chat([USER])) == template_of(CHATML_TEMPLATE).render(Chat([USER]))


def test_the_time_a_template_sees_stands_still_for_a_day(template_of: Callable[..., ChatTemplate]) -> None:
    midnight = datetime(2027, 1, 1, tzinfo=UTC)
    clock = midnight - timedelta(days=1)
    template = template_of(DATED_TEMPLATE, lambda: clock)
    shown = []
    for seconds in (0, 1, 86_399.999999, 86_400, 90_000, 172_800):
        clock = midnight - timedelta(days=1) + timedelta(seconds=seconds)
        shown.append(template.render(Chat([USER])).splitlines()[1])
    yesterday, today, tomorrow = (
        f"Today: {date} 00:00:00.000000" for date in ("31 Dec 2026", "01 Jan 2027", "02 Jan 2027")
    )
    assert [line.removesuffix("<|im_end|>") for line in shown] == [yesterday] * 3 + [today] * 2 + [tomorrow]


def test_one_prompt_has_one_date_though_it_is_rendered_over_midnight(template_of: Callable[..., ChatTemplate]) -> None:
    seconds: Iterator[int] = count()

    def now() -> datetime:
        return datetime(2026, 12, 31, 23, 59, 59, tzinfo=UTC) + timedelta(seconds=next(seconds))

    template = template_of("{{ messages[0].content }} {{ strftime_now('%d') }} {{ strftime_now('%d') }}", now)
    _, first, second = template.render(Chat([ChatMessage("user", "hi")])).split()
    assert first == second


@pytest.mark.parametrize("name", sorted(RESERVED_VARIABLES))
def test_variables_do_not_stand_in_for_other_fields(template_of: Callable[..., ChatTemplate], name: str) -> None:
    with pytest.raises(PromptError, match=f"must not set '{name}'") as caught:
        template_of(TOOL_TEMPLATE).render(variables(json.dumps({name: "x"})))
    assert caught.value.field == "chat_template_kwargs"


def test_variables_are_rendered_in_canonical_order(template_of: Callable[..., ChatTemplate]) -> None:
    template = template_of("{{ messages[0].content }}{{ documents | tojson }}")
    texts = {
        template.render(variables(text))
        for text in ('{"documents": [{"title": "T", "text": "x"}]}', '{"documents": [{"text": "x", "title": "T"}]}')
    }
    assert texts == {'How will it be?[{"text": "x", "title": "T"}]'}


CONTINUED = [ChatMessage("user", "Hi"), ChatMessage("assistant", "Well,  ")]


def test_the_size_of_a_chat_counts_all_that_is_rendered() -> None:
    long = '{"x": "' + "y" * 1000 + '"}'
    empty = Chat([ChatMessage("user", "")])
    for chat in (
        Chat([ChatMessage("user", long)]),
        Chat([ChatMessage("user", ["", long])]),
        Chat(empty.messages, [Tool("f", long)]),
        Chat(empty.messages, [Tool("f", None, JsonText(long, ""))]),
        Chat([ChatMessage("assistant", "", tool_calls=[ToolCall("1", "f", JsonText(long, ""))])]),
        Chat(empty.messages, variables=JsonText(long, "")),
    ):
        assert chat.num_characters() - empty.num_characters() == len(long)


@pytest.mark.parametrize(
    ("source", "end"), [(CHATML_TEMPLATE, "assistant\nWell,  "), (DATED_TEMPLATE, "assistant\nWell,")]
)
def test_the_last_message_can_be_continued(template_of: Callable[..., ChatTemplate], source: str, end: str) -> None:
    chat = Chat(CONTINUED, add_generation_prompt=False, continue_final_message=True)
    assert template_of(source).render(chat).endswith(end)


def test_the_last_of_several_parts_is_continued(template_of: Callable[..., ChatTemplate]) -> None:
    source = "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endfor %}"
    for parts, end in [(["one", "two"], "<one><two"), ([], "[assistant]<"), ("alone", "<alone")]:
        chat = Chat([USER, ChatMessage("assistant", parts)], continue_final_message=True, add_generation_prompt=False)
        assert template_of(source).render(chat).endswith(end)


def test_a_message_that_is_not_shown_cannot_be_continued(template_of: Callable[..., ChatTemplate]) -> None:
    with pytest.raises(ChatTemplateError, match="does not show the end") as caught:
        template_of("{{ messages[0].content }}").render(Chat(CONTINUED, continue_final_message=True))
    assert caught.value.field == "continue_final_message"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(messages[0]) }}",
        "{{ strftime_now.__self__.year }}",
    ],
)
def test_templates_run_in_a_sandbox(template_of: Callable[..., ChatTemplate], source: str) -> None:
    with pytest.raises(ChatTemplateError, match="unsafe"):
        template_of(source).render(Chat([USER]))


@pytest.mark.parametrize("template", ["{% for %}", "{{ 'unclosed }}"])
def test_a_template_that_cannot_be_read_is_told_at_the_start(
    chat_model_dir: Path, tmp_path: Path, template: str
) -> None:
    tokenizer_with(chat_model_dir, template).save_pretrained(tmp_path)
    with pytest.raises(TokenizerLoadError, match="chat template"):
        load_tokenizer(tmp_path)
