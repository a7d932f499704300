"""What a request calls the fields of the chat that was made of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

_OF_MESSAGE = re.compile(
    r"messages\[(?P<message>\d+)\](?:\.(?P<list>content|tool_calls)\[(?P<index>\d+)\])?(?P<rest>.*)"
)
_OF_TOOL = re.compile(r"(?P<tool>tools\[\d+\])\.function(?P<rest>\..*)")


@dataclass(frozen=True, slots=True)
class MessageNames:
    """Where in a request a message of its chat comes from: all of it, its content, each part of that, each call."""

    message: str
    content: str
    parts: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)


def request_name(chat_field: str, messages: Sequence[MessageNames]) -> str:
    """The field of the request that `chat_field` was made of; `messages` are those of the chat."""
    if chat_field == "continue_final_message":
        return messages[-1].message
    if tool := _OF_TOOL.fullmatch(chat_field):
        return tool["tool"] + tool["rest"].replace(".parameters", ".input_schema")
    found = _OF_MESSAGE.fullmatch(chat_field)
    if found is None or int(found["message"]) >= len(messages):
        return chat_field
    names, rest = messages[int(found["message"])], found["rest"]
    if found["list"] == "content":
        return names.parts[int(found["index"])] + rest
    if found["list"] == "tool_calls":
        return names.calls[int(found["index"])] + rest.replace(".function.", ".").replace(".arguments", ".input")
    by_rest = {
        ".content": names.parts[0] if len(names.parts) == 1 else names.content,
        ".role": names.message,
        ".tool_calls": names.calls[0] if names.calls else names.message,
        ".tool_call_id": f"{names.message}.tool_use_id",
    }
    return by_rest.get(rest, names.message + rest)
