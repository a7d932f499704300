"""Where in the text that a chat template makes places of the chat stand.

A template is a program: it may move a system prompt into the first user message, drop what an assistant thought once
the user has answered, show pictures before texts. So nothing is assumed of it. A place is found by rendering the chat
with something else there, and looking how far both texts agree, from the beginning or from the end.

What is put there is a character that the text does not hold, so that nothing agrees by accident.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, takewhile
from typing import NamedTuple

import msgspec

from .canonical_json import JsonText, canonical_object
from .chat import Chat, ChatMessage, ChatPicture, Tool, ToolCall
from .chat_template import ChatTemplate
from .errors import PromptError
from .places import Bounds, MessagePlace, Place, ToolPlace, parts_of

# Unicode's private ones, that no template would trim.
_STRANGE_CHARACTERS = (range(0xE000, 0xF8FF), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
# Some templates take only nine letters or digits.
_CALL_ID = "strangers"


class PlaceOffsets(NamedTuple):
    """As `TokenRange`, in characters of a text."""

    start: int
    shown: int
    end: int


def place_offsets(
    template: ChatTemplate, chat: Chat, text: str, places: Sequence[Place], bounds: Bounds = "all"
) -> list[PlaceOffsets]:
    """Of each of `places` of `chat`, which renders as `text`.

    A message begins where its header does, and ends with what closes it. A tool's `start` depends on no message but
    the system prompt. Of a place that is not shown both are where it would stand, or as near before as can be known.
    Renders the chat about twice for each start and each end. Raises PromptError: see `_strange_to`.
    """
    if not places:
        return []
    offsets = _Offsets(template, chat, text, _strange_to(text))
    return [offsets.of(place, bounds) for place in places]


def _strange_to(text: str) -> str:
    """A character that `text` does not hold. Raises PromptError if it holds all that could be taken."""
    candidates = map(chr, chain(*_STRANGE_CHARACTERS))
    if (first := next(candidates)) not in text:
        return first
    there = set(text)
    strange = next((character for character in candidates if character not in there), None)
    if strange is None:
        raise PromptError("the chat holds all of Unicode's private characters; no place in it can be found")
    return strange


class _Offsets:
    def __init__(self, template: ChatTemplate, chat: Chat, text: str, strange: str) -> None:
        self._template = template
        self._chat = chat
        self._text = text
        self._strange = strange
        self._known_texts: dict[int, str | None] = {}

    def of(self, place: Place, bounds: Bounds) -> PlaceOffsets:
        if bounds == "start":
            return PlaceOffsets(self._begins(place), 0, len(self._text))
        if bounds == "end":
            ends = list(self._ends(place))
            return PlaceOffsets(0, 0, max(ends) if ends else self._begins(place))
        start = self._begins(place)
        shown = max(start, self._shown(place, start))
        return PlaceOffsets(start, shown, max([shown, *self._ends(place)]))

    def _begins(self, place: Place) -> int:
        match place:
            case ToolPlace(tool):
                return self._tool_begins(tool)
            case MessagePlace(message, int(part)):
                return self._part_begins(message, part)
            case MessagePlace(message):
                return self._message_begins(message)

    def _shown(self, place: Place, start: int) -> int:
        match place:
            case MessagePlace(message, int(part)):
                return self._part_shown(message, part)
            case _:
                return start

    def _ends(self, place: Place) -> Iterator[int]:
        match place:
            case ToolPlace(tool):
                yield from self._tool_ends(tool)
            case MessagePlace(message, int(part)):
                yield from self._part_ends(message, part)
            case MessagePlace(message):
                yield from self._message_ends(message)

    def _message_begins(self, i: int) -> int:
        """As far as the text is the same without the message and all behind it, and with another one there."""
        before = self._chat.messages[:i]
        alone = self._up_to(i)
        others = ("user",) if alone is not None else ("user", "assistant")
        return self._agree(alone, *(self._ended([*before, self._stranger(role)]) for role in others))

    def _message_ends(self, i: int) -> Iterator[int]:
        message = self._chat.messages[i]
        yield from self._end_of_change(self._with_message(i, replace(message, content=self._longer(message.content))))
        if message.tool_calls:
            called = [*message.tool_calls, ToolCall(_CALL_ID, self._strange, JsonText("{}", ""))]
            yield from self._begin_of_change(self._with_message(i, replace(message, tool_calls=called)))
        # With what closes it, and with calls where the template takes no other one.
        yield self._agree(self._up_to(i + 1))

    def _part_begins(self, i: int, part: int) -> int:
        *before, message = self._chat.messages[: i + 1]
        changed = replace(message, content=[*parts_of(message)[:part], self._strange], tool_calls=())
        behind = [self._stranger("user")]
        if message.role == "user":
            behind.insert(0, self._stranger("assistant"))
        texts = self._ended([*before, changed]), self._ended([*before, changed, *behind])
        return self._agree(*texts) if any(text is not None for text in texts) else self._message_begins(i)

    def _part_shown(self, i: int, part: int) -> int:
        """Where the text changes with its first character, and nothing else."""
        text = parts_of(self._chat.messages[i])[part]
        if not isinstance(text, str):
            return self._picture(i, part)[0]
        return max(self._begin_of_change(self._with_part(i, part, self._strange + text)), default=0)

    def _part_ends(self, i: int, part: int) -> Iterator[int]:
        text = parts_of(self._chat.messages[i])[part]
        if not isinstance(text, str):
            yield self._picture(i, part)[1]
        else:
            yield from self._end_of_change(self._with_part(i, part, text + self._strange))

    def _picture(self, i: int, part: int) -> tuple[int, int]:
        """Its image token."""
        token = self._template.image_token
        assert token is not None
        begin, end = 0, 0
        for _ in range(self._chat.picture_places.index((i, part)) + 1):
            begin = self._text.index(token, end)
            end = begin + len(token)
        return begin, end

    def _tool_begins(self, i: int) -> int:
        system = list(takewhile(lambda message: message.role == "system", self._chat.messages))
        tools = self._chat.tools[:i]
        messages = [*system, self._stranger("user")]
        without = self._ended(messages, tools)
        return self._agree(self._ended(messages, [*tools, Tool(self._strange)]) if without is None else without)

    def _tool_ends(self, i: int) -> Iterator[int]:
        tools = list(self._chat.tools)
        others = tools[: i + 1] if i + 1 < len(tools) else [*tools, Tool(self._strange)]
        yield from self._begin_of_change(self._render(replace(self._chat, tools=others)))
        # If the template tells first how many there are, nothing else finds it.
        tools[i] = self._longer_tool(tools[i])
        yield from self._end_of_change(self._render(replace(self._chat, tools=tools)))

    def _stranger(self, role: str) -> ChatMessage:
        return ChatMessage(role, self._strange)

    def _longer(self, content: str | Sequence[str | ChatPicture]) -> str | Sequence[str | ChatPicture]:
        if isinstance(content, str):
            return content + self._strange
        if content and isinstance(last := content[-1], str):
            return [*content[:-1], last + self._strange]
        return [*content, self._strange]

    def _longer_tool(self, tool: Tool) -> Tool:
        schema = {} if tool.parameters is None else canonical_object(tool.parameters)
        json = msgspec.json.encode(schema | {self._strange: ""})
        return replace(tool, description=(tool.description or "") + self._strange, parameters=JsonText(json, ""))

    def _up_to(self, i: int) -> str | None:
        """Of the first `i` messages."""
        if i not in self._known_texts:
            self._known_texts[i] = self._ended(self._chat.messages[:i])
        return self._known_texts[i]

    def _ended(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] | None = None) -> str | None:
        """Of other messages, after which nothing follows."""
        tools = self._chat.tools if tools is None else tools
        return self._render(
            replace(
                self._chat, messages=messages, tools=tools, add_generation_prompt=False, continue_final_message=False
            )
        )

    def _with_part(self, i: int, part: int, text: str) -> str | None:
        message = self._chat.messages[i]
        if isinstance(message.content, str):
            return self._with_message(i, replace(message, content=text))
        parts = [*message.content]
        parts[part] = text
        return self._with_message(i, replace(message, content=parts))

    def _with_message(self, i: int, message: ChatMessage) -> str | None:
        messages = [*self._chat.messages]
        messages[i] = message
        return self._render(replace(self._chat, messages=messages))

    def _render(self, chat: Chat) -> str | None:
        """None if the template refuses it."""
        try:
            return self._template.render_unchecked(chat)
        except PromptError:
            return None

    def _agree(self, *texts: str | None) -> int:
        """How far the text is the same as all of `texts` that there are; 0 if there are none."""
        return min((common_beginning(self._text, text) for text in texts if text is not None), default=0)

    def _begin_of_change(self, changed: str | None) -> Iterator[int]:
        if changed is not None and changed != self._text:
            yield common_beginning(self._text, changed)

    def _end_of_change(self, changed: str | None) -> Iterator[int]:
        if changed is not None and changed != self._text:
            yield len(self._text) - common_ending(self._text, changed)


def common_beginning(one: str, other: str) -> int:
    """How many first characters are the same."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least


def common_ending(one: str, other: str) -> int:
    """How many last characters are the same."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one[len(one) - middle : len(one) - least] == other[len(other) - middle : len(other) - least]:
            least = middle
        else:
            most = middle - 1
    return least
