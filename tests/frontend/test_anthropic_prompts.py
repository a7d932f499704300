"""Requests of the Anthropic API → chats, their breakpoints, and what the request calls the parts of the chat."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from frontend.anthropic.chat_prompt import AskedChat, asked_chat
from frontend.anthropic.protocol import CountTokensRequest
from frontend.prompt.canonical_json import canonical_object
from frontend.prompt.chat import ChatPicture
from frontend.prompt.errors import PromptError
from frontend.prompt.places import MessagePlace, ToolPlace

FIVE_MINUTES, HOUR = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}


def asked(*messages: dict[str, Any], **fields: Any) -> AskedChat:
    request = msgspec.json.decode(msgspec.json.encode({"messages": messages, **fields}), type=CountTokensRequest)
    return asked_chat(request, takes_pictures=True)


def turns(chat: AskedChat) -> list[tuple[str, Any]]:
    return [(message.role, message.content) for message in chat.chat.messages]


def text(said: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **fields}


def call(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{name}", "name": name, "input": {"b": 1, "a": [2]}} | fields


def result(content: Any = None, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "toolu_f", "content": content} | fields


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content[0] if isinstance(content[0], str) else list(content)}


def assistant(*content: Any) -> dict[str, Any]:
    return user(*content) | {"role": "assistant"}


def test_the_system_prompt_comes_first() -> None:
    assert turns(asked(user("Hi"), system="Be brief.")) == [("system", "Be brief."), ("user", "Hi")]
    assert turns(asked(user("Hi"), system=[text("Be"), text("brief.")])) == [
        ("system", ["Be", "brief."]),
        ("user", "Hi"),
    ]
    assert turns(asked(user("Hi"), system=[])) == turns(asked(user("Hi"), system="")) == [("user", "Hi")]


def test_one_block_of_text_is_its_text() -> None:
    assert turns(asked(user(text("Hi")))) == turns(asked(user("Hi"))) == [("user", "Hi")]


def test_turns_of_one_role_are_one() -> None:
    chat = asked(user("a"), user(text("b"), text("c")), assistant("d"), assistant("e"), user("f"))
    assert turns(chat) == [("user", ["a", "b", "c"]), ("assistant", ["d", "e"]), ("user", "f")]
    assert chat.names.of_chat("messages[0].content[2]") == "messages[1].content[1]"
    assert chat.names.of_chat("messages[1].content[1]") == "messages[3].content"
    assert chat.names.of_chat("messages[2].content") == "messages[4].content"


def test_a_system_message_on_the_way_stays_there() -> None:
    chat = asked(user("a"), {"role": "system", "content": "Now in French."}, user("b"))
    assert turns(chat) == [("user", "a"), ("system", "Now in French."), ("user", "b")]


def test_each_result_is_a_message_of_its_own_where_it_stands() -> None:
    chat = asked(
        user("?"),
        assistant(text("See:"), call(), call("g")),
        user(
            result("one"), text("x"), result([text("two"), text("three")], tool_use_id="toolu_g"), text("y"), text("z")
        ),
    )
    assert turns(chat)[2:] == [("tool", "one"), ("user", "x"), ("tool", ["two", "three"]), ("user", ["y", "z"])]
    assert [message.tool_call_id for message in chat.chat.messages[2:]] == ["toolu_f", None, "toolu_g", None]
    assert chat.names.of_chat("messages[2].role") == "messages[2].content[0]"
    assert chat.names.of_chat("messages[4].content[1]") == "messages[2].content[2].content[1]"
    assert chat.names.of_chat("messages[4].tool_call_id") == "messages[2].content[2].tool_use_id"
    assert chat.names.of_chat("messages[5].content[0]") == "messages[2].content[3]"


@pytest.mark.parametrize(
    ("block", "content"),
    [
        (result(), ""),
        (result([]), ""),
        (result("no", is_error=True), "Error: no"),
        (result(is_error=True), "Error:"),
        (result([text("no"), text("way")], is_error=True), ["Error:", "no", "way"]),
    ],
)
def test_results_without_content_and_errors(block: dict[str, Any], content: Any) -> None:
    assert turns(asked(user(block))) == [("tool", content)]


def test_calls() -> None:
    chat = asked(user("?"), assistant(call(), text("a"), call("g")), user(result("ok")))
    message = chat.chat.messages[1]
    assert (message.content, [(each.id, each.name) for each in message.tool_calls]) == (
        "a",
        [("toolu_f", "f"), ("toolu_g", "g")],
    )
    assert canonical_object(message.tool_calls[1].arguments) == {"a": [2], "b": 1}
    arguments = message.tool_calls[1].arguments.field
    assert chat.names.of_chat(arguments) == "messages[1].content[2].input"
    assert chat.names.of_chat("messages[1].tool_calls") == "messages[1].content[0]"
    assert chat.names.of_chat("messages[1].tool_calls[1].function.name") == "messages[1].content[2].name"


def test_thinking_is_left_out_but_its_turn_stays() -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": "x"}
    chat = asked(user("a"), assistant(thinking), user("b"), assistant(thinking, text("c")), user("d"))
    assert turns(chat) == [("user", "a"), ("assistant", ""), ("user", "b"), ("assistant", "c"), ("user", "d")]


@pytest.mark.parametrize("goes_on", [False, True])
def test_an_assistants_last_turn_goes_on(goes_on: bool) -> None:
    chat = asked(user("a"), *([assistant("b")] if goes_on else [])).chat
    assert (chat.add_generation_prompt, chat.continue_final_message) == (not goes_on, goes_on)


def test_pictures() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    chat = asked(
        user(text("a"), {"type": "image", "source": source}),
        user(result([{"type": "image", "source": {"type": "url", "url": "https://x/y"}}])),
    )
    (_, first), (second,) = (message.content for message in chat.chat.messages)
    assert first == ChatPicture("data:image/png;base64,AAAA", "messages[0].content[1]")
    assert second == ChatPicture("https://x/y", "messages[1].content[0]")
    assert chat.names.pictures() == ["messages[0].content[1]", "messages[1].content[0].content[0]"]


def test_breakpoints_are_where_they_were_set() -> None:
    chat = asked(
        user("?"),
        user(text("a", cache_control=FIVE_MINUTES)),
        assistant(call(cache_control=HOUR)),
        user(result([text("b"), text("c", cache_control=HOUR)], cache_control=FIVE_MINUTES)),
        tools=[{"name": "f", "input_schema": {}}, {"name": "g", "input_schema": {}, "cache_control": HOUR}],
        system=[text("s"), text("t", cache_control=HOUR), text("u")],
    )
    assert [(point.place, point.control.ttl_s, point.field) for point in chat.breakpoints] == [
        (ToolPlace(1), 3600, "tools[1].cache_control"),
        (MessagePlace(0, 1), 3600, "system[1].cache_control"),
        (MessagePlace(1, 1), 300, "messages[1].content[0].cache_control"),
        (MessagePlace(2), 3600, "messages[2].content[0].cache_control"),
        (MessagePlace(3, 1), 3600, "messages[3].content[0].content[1].cache_control"),
        (MessagePlace(3), 300, "messages[3].content[0].cache_control"),
    ]


def test_a_breakpoint_for_all_is_at_the_last_block_that_can_have_one() -> None:
    def points(*messages: dict[str, Any]) -> list[Any]:
        chat = asked(*messages, cache_control=FIVE_MINUTES, system="s")
        return [(point.place, point.field) for point in chat.breakpoints]

    assert points(user("a")) == [(MessagePlace(1, 0), "cache_control")]
    assert points(user(text("a"), text("b"))) == [(MessagePlace(1, 1), "cache_control")]
    assert points(user("?"), assistant(call()), user(result("b"))) == [(MessagePlace(3), "cache_control")]
    thought = {"type": "redacted_thinking", "data": ""}
    assert points(user("a"), assistant(thought)) == [(MessagePlace(1, 0), "cache_control")]
    # There is one already.
    assert points(user(text("a", cache_control=FIVE_MINUTES))) == [
        (MessagePlace(1, 0), "messages[0].content[0].cache_control")
    ]


def test_parts_of_a_request_have_places_in_the_chat() -> None:
    thinking = {"type": "thinking", "thinking": "hm"}
    chat = asked(
        user("a"),
        user(text("b"), text("c")),
        assistant(thinking, call()),
        user(result([text("d"), text("e")]), text("f")),
        assistant(thinking),
        system=[text("s"), text("t")],
        tools=[{"name": "f", "input_schema": {}}],
    )
    assert {name: str(place) for name, place in chat.places.items()} == {
        "tools[0]": "tools[0]",
        "system": "messages[0]",
        "system[0]": "messages[0].content[0]",
        "system[1]": "messages[0].content[1]",
        "messages[0]": "messages[1]",
        "messages[0].content": "messages[1].content[0]",
        "messages[1]": "messages[1].content[1]",
        "messages[1].content[0]": "messages[1].content[1]",
        "messages[1].content[1]": "messages[1].content[2]",
        "messages[2]": "messages[2]",
        "messages[2].content[1]": "messages[2]",
        "messages[3]": "messages[3]",
        "messages[3].content[0]": "messages[3]",
        "messages[3].content[0].content[0]": "messages[3].content[0]",
        "messages[3].content[0].content[1]": "messages[3].content[1]",
        "messages[3].content[1]": "messages[4].content[0]",
        "messages[4]": "messages[5]",
    }
    with pytest.raises(PromptError, match=r"'messages\[5\]', which names no part") as refused:
        chat.place_named("messages[5]")
    assert refused.value.field == "cache_salt.from"
