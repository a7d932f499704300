"""A chat as data: what a model's chat template is given, whatever API it came through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from .canonical_json import JsonText


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may ask to have called. `parameters` is the JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: JsonText | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call the model asked for. `arguments` is a JSON object."""

    id: str
    name: str
    arguments: JsonText


@dataclass(frozen=True, slots=True)
class ChatPicture:
    """A picture in a message, not looked at yet.

    `uuid` is a name that its caller has for it; without a `url`, for one that came before. `field` is the part of the
    chat that it is.
    """

    url: str | None
    field: str
    detail: Literal["auto", "low", "high"] = "auto"
    uuid: str | None = None


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn. `content` is its text, or its texts and pictures in their order."""

    role: str
    content: str | Sequence[str | ChatPicture]
    name: str | None = None
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat and how it is to be rendered.

    With `add_generation_prompt` the prompt ends where the assistant is to speak; with `continue_final_message` at the
    end of the last message's text, which the model goes on with. Not both. `variables` is a JSON object whose items
    the template sees by their names, `picture_settings` one of what the model's image processor is told.
    """

    messages: Sequence[ChatMessage]
    tools: Sequence[Tool] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: JsonText | None = None
    picture_settings: JsonText | None = None

    @property
    def pictures(self) -> list[ChatPicture]:
        """All of them, in their order."""
        return [picture for _, _, picture in self._placed_pictures()]

    @property
    def picture_places(self) -> list[tuple[int, int]]:
        """The message of each, and its part of that."""
        return [(message, part) for message, part, _ in self._placed_pictures()]

    def _placed_pictures(self) -> Iterator[tuple[int, int, ChatPicture]]:
        for i, message in enumerate(self.messages):
            if not isinstance(message.content, str):
                for j, part in enumerate(message.content):
                    if isinstance(part, ChatPicture):
                        yield i, j, part

    def num_characters(self) -> int:
        """About how long the rendered text will be."""
        texts = sum(len(part) for message in self.messages for part in _texts(message))
        descriptions = sum(len(tool.description or "") for tool in self.tools)
        json = [call.arguments for message in self.messages for call in message.tool_calls]
        json += [tool.parameters for tool in self.tools if tool.parameters is not None]
        json += [] if self.variables is None else [self.variables]
        return texts + descriptions + sum(len(each.text) for each in json)


def _texts(message: ChatMessage) -> Sequence[str]:
    if isinstance(message.content, str):
        return (message.content,)
    return [part for part in message.content if isinstance(part, str)]
