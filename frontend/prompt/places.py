"""Places in a chat, and which tokens of its prompt they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class MessagePlace:
    """A message of a chat, or one part of its content."""

    message: int
    part: int | None = None


@dataclass(frozen=True, slots=True)
class ToolPlace:
    """A tool that the model is shown."""

    tool: int


Place = MessagePlace | ToolPlace


class TokenRange(NamedTuple):
    """Tokens `[start, end)` of a prompt.

    No token before `start` depends on what stands in the place or behind it; tokens before `end` show all of the place.
    """

    start: int
    end: int
