"""Where a chat's request has a `cache_control`."""

from __future__ import annotations

from collections.abc import Sequence

from frontend.prompt.breakpoints import Breakpoint
from frontend.prompt.places import MessagePlace, Place, ToolPlace

from .protocol import ImageUrlPart, Message, TextPart, Tool


def breakpoints_of(messages: Sequence[Message], tools: Sequence[Tool] | None) -> list[Breakpoint]:
    """Of tools, then of messages, each in their order."""
    found: list[Breakpoint] = []

    def look(at: Tool | TextPart | ImageUrlPart, place: Place, field: str) -> None:
        if at.cache_control is not None:
            found.append(Breakpoint(place, at.cache_control, f"{field}.cache_control"))

    for i, tool in enumerate(tools or ()):
        look(tool, ToolPlace(i), f"tools[{i}]")
    for i, message in enumerate(messages):
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if isinstance(part, TextPart | ImageUrlPart):
                look(part, MessagePlace(i, j), f"messages[{i}].content[{j}]")
    return found
