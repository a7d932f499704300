"""What has been said, and what a person can do to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec


@dataclass(slots=True)
class Conversation:
    """Turns of a chat: what was asked and what was answered. A turn is kept once there is an answer to it."""

    system: str | None = None
    turns: list[tuple[str, str]] = field(default_factory=list)

    def messages(self, question: str | None = None) -> list[dict[str, str]]:
        """The conversation as the OpenAI API's messages, with `question` at its end."""
        said = [("system", self.system)] if self.system else []
        for asked, answered in self.turns:
            said += [("user", asked), ("assistant", answered)]
        if question is not None:
            said.append(("user", question))
        return [{"role": role, "content": content} for role, content in said]

    def save(self, file: Path) -> None:
        """Write the messages as the JSON a request would carry; replaces `file`. Raises OSError."""
        content = msgspec.json.format(msgspec.json.encode({"messages": self.messages()}), indent=2)
        file.expanduser().write_bytes(content + b"\n")
