"""No text makes a picture: what a client writes must not spell the tokens that stand for pictures in a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .canonical_json import JsonText, canonical_object
from .chat import Chat, ChatMessage, Tool
from .errors import PromptError


def refuse_spellings(chat: Chat, spellings: Sequence[str]) -> None:
    """Raises PromptError naming the first field of `chat` in whose text, or JSON, one of `spellings` stands."""
    for field, text in _texts(chat):
        for spelling in spellings:
            if spelling in text:
                raise PromptError(
                    f"{field} holds '{spelling}', which stands for a picture in this model's prompts; send pictures as"
                    " parts of a message, and this text in another spelling",
                    field,
                )


def _texts(chat: Chat) -> Iterator[tuple[str, str]]:
    """Every text a template may show, with the name of its field."""
    for i, message in enumerate(chat.messages):
        yield from _of_message(message, f"messages[{i}]")
    for i, tool in enumerate(chat.tools):
        yield from _of_tool(tool, f"tools[{i}].function")
    yield from _of_json(chat.variables)


def _of_message(message: ChatMessage, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(message.content, str):
        yield f"{path}.content", message.content
    else:
        texts = [(j, part) for j, part in enumerate(message.content) if isinstance(part, str)]
        yield from ((f"{path}.content[{j}]", text) for j, text in texts)
        if len(texts) > 1:
            # Templates put parts together, those around a picture, too, if they show it elsewhere.
            yield f"{path}.content", "".join(text for _, text in texts)
    yield f"{path}.name", message.name or ""
    yield f"{path}.tool_call_id", message.tool_call_id or ""
    for j, call in enumerate(message.tool_calls):
        yield f"{path}.tool_calls[{j}].id", call.id
        yield f"{path}.tool_calls[{j}].function.name", call.name
        yield from _of_json(call.arguments)


def _of_tool(tool: Tool, path: str) -> Iterator[tuple[str, str]]:
    yield f"{path}.name", tool.name
    yield f"{path}.description", tool.description or ""
    yield from _of_json(tool.parameters)


def _of_json(json: JsonText | None) -> Iterator[tuple[str, str]]:
    if json is not None:
        yield from ((json.field, text) for text in _strings(canonical_object(json)))


def _strings(value: Any) -> Iterator[str]:
    left = [value]
    while left:
        node = left.pop()
        if isinstance(node, str):
            yield node
        elif isinstance(node, dict):
            left += [*node.keys(), *node.values()]
        elif isinstance(node, list):
            left += node
