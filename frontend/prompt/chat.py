"""A chat as data: what a model's chat template is given, whatever API it came through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
class ChatMessage:
    """One turn. `content` is its text, or the texts of its parts."""

    role: str
    content: str | Sequence[str]
    name: str | None = None
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat and how it is to be rendered.

    With `add_generation_prompt` the prompt ends where the assistant is to speak; with `continue_final_message` at the
    end of the last message's text, which the model goes on with. Not both. `variables` is a JSON object whose items
    the template sees by their names.
    """

    messages: Sequence[ChatMessage]
    tools: Sequence[Tool] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: JsonText | None = None

    def num_characters(self) -> int:
        """About how long the rendered text will be."""
        texts = sum(len(part) for message in self.messages for part in _texts(message))
        descriptions = sum(len(tool.description or "") for tool in self.tools)
        json = [call.arguments for message in self.messages for call in message.tool_calls]
        json += [tool.parameters for tool in self.tools if tool.parameters is not None]
        json += [] if self.variables is None else [self.variables]
        return texts + descriptions + sum(len(each.text) for each in json)


def _texts(message: ChatMessage) -> Sequence[str]:
    return (message.content,) if isinstance(message.content, str) else message.content
