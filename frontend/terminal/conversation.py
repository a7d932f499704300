"""What has been said, and what a person can do to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from .attachments import Attachment


@dataclass(frozen=True, slots=True)
class Question:
    """What a person said, and the pictures that went with it, which come first."""

    text: str
    pictures: tuple[Attachment, ...] = ()

    def content(self) -> str | list[dict[str, object]]:
        """As the content of a message of the OpenAI API."""
        if not self.pictures:
            return self.text
        return [*(picture.part() for picture in self.pictures), {"type": "text", "text": self.text}]

    def __str__(self) -> str:
        return f"{'; '.join(map(str, self.pictures))}: {self.text}" if self.pictures else self.text


@dataclass(slots=True)
class Conversation:
    """Turns of a chat: what was asked and what was answered. A turn is kept once there is an answer to it.

    `pictures` wait for the next question.
    """

    system: str | None = None
    turns: list[tuple[Question, str]] = field(default_factory=list)
    pictures: list[Attachment] = field(default_factory=list)

    def ask(self, text: str) -> Question:
        """`text` with the pictures that waited for it."""
        question = Question(text, tuple(self.pictures))
        self.pictures.clear()
        return question

    def messages(self, question: Question | None = None) -> list[dict[str, Any]]:
        """The conversation as the OpenAI API's messages, with `question` at its end."""
        said: list[tuple[str, Any]] = [("system", self.system)] if self.system else []
        for asked, answered in self.turns:
            said += [("user", asked.content()), ("assistant", answered)]
        if question is not None:
            said.append(("user", question.content()))
        return [{"role": role, "content": content} for role, content in said]

    def save(self, file: Path) -> None:
        """Write the messages as the JSON a request would carry; replaces `file`. Raises OSError."""
        content = msgspec.json.format(msgspec.json.encode({"messages": self.messages()}), indent=2)
        file.expanduser().write_bytes(content + b"\n")
