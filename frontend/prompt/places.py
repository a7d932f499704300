"""Places in a chat, and which tokens of its prompt they are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .chat import Chat, ChatMessage, ChatPicture
from .errors import PromptError


@dataclass(frozen=True, slots=True)
class MessagePlace:
    """A message of a chat, or one part of its content. A content that is a string is its own part 0."""

    message: int
    part: int | None = None

    def __str__(self) -> str:
        return f"messages[{self.message}]" + ("" if self.part is None else f".content[{self.part}]")


@dataclass(frozen=True, slots=True)
class ToolPlace:
    """A tool that the model is shown."""

    tool: int

    def __str__(self) -> str:
        return f"tools[{self.tool}]"


Place = MessagePlace | ToolPlace

_NUMBER = r"\[([0-9]{1,9})\]"
_NAME = re.compile(rf"messages{_NUMBER}(?:\.content{_NUMBER})?|tools{_NUMBER}")


# What of a place is to be found. The rest of its range is that of the whole prompt, which is true, too.
Bounds = Literal["all", "start", "end"]


def bounds_of(starts: Sequence[Place], ends: Sequence[Place]) -> Bounds:
    """What has to be found where only the start of some and the end of others matters."""
    if starts and ends:
        return "all"
    return "start" if starts else "end"


class TokenRange(NamedTuple):
    """Tokens of a prompt that are about a place.

    No token before `start` depends on what stands in the place or behind it. The tokens `[shown, end)` show all of it;
    `start` is at most `shown`, and less where a token before depends on what follows.
    """

    start: int
    shown: int
    end: int


def places_of(chat: Chat) -> list[Place]:
    """All of them: tools, then each message and its parts."""
    places: list[Place] = [ToolPlace(tool) for tool in range(len(chat.tools))]
    for i, message in enumerate(chat.messages):
        places.append(MessagePlace(i))
        places += [MessagePlace(i, part) for part in range(len(parts_of(message)))]
    return places


def parts_of(message: ChatMessage) -> Sequence[str | ChatPicture]:
    """Of its content."""
    return (message.content,) if isinstance(message.content, str) else message.content


def innermost(ranges: Mapping[Place, TokenRange], token: int) -> Place | None:
    """The smallest of `ranges` that shows `token`; None if that is text of the chat template, in no place."""
    around = [(place, range_) for place, range_ in ranges.items() if range_.shown <= token < range_.end]
    # Of equals the one that comes later, which is the part of a message rather than the message.
    found = min(reversed(around), key=lambda item: item[1].end - item[1].shown, default=None)
    return None if found is None else found[0]


def place_named(name: str, field: str) -> Place:
    """The place that is spelled `messages[i]`, `messages[i].content[j]` or `tools[i]`, as `str(place)` does.

    Raises PromptError naming `field`.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise PromptError(
            f"{field} is {name[:100]!r}, which names no place; places are spelled 'messages[1]',"
            " 'messages[1].content[0]' or 'tools[0]'",
            field,
        )
    message, part, tool = (None if number is None else int(number) for number in found.groups())
    if message is not None:
        return MessagePlace(message, part)
    assert tool is not None
    return ToolPlace(tool)


def check_place(place: Place, chat: Chat, field: str) -> None:
    """Raises PromptError naming `field`: `chat` has no such place."""
    match place:
        case ToolPlace(tool):
            what, number, where = "tools", len(chat.tools), tool
        case MessagePlace(message, int(part)) if message < len(chat.messages):
            content = chat.messages[message].content
            what, number, where = f"parts in messages[{message}]", len(parts_of(chat.messages[message])), part
            if isinstance(content, str):
                what += " (a string is one)"
        case MessagePlace(message):
            what, number, where = "messages", len(chat.messages), message
    if where >= number:
        raise PromptError(
            f"{field} names {place}, but the number of {what} is {number}; they are counted from 0", field
        )
