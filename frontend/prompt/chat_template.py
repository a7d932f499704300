"""A model's chat template: messages → the text the model was trained to continue.

Special tokens in a message's text are *not* neutralised: the rendered text is tokenized with special tokens
recognised, as every peer does it, because clients rely on it (prompts with tool markup or a thinking switch in
them). A service that relays untrusted text should strip `<|…|>` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import ChatTemplateError

_PROBE = "foreword-probe"


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn. `content` is its text, or the texts of its parts."""

    role: str
    content: str | Sequence[str]
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """`takes_strings`, `takes_parts`: which forms of `content` the template understands (found by trying)."""

    apply: Callable[[list[dict[str, Any]]], str]
    takes_strings: bool
    takes_parts: bool

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt's text, ending where the assistant is to speak.

        Raises ChatTemplateError with what the template said (for instance that roles must alternate).
        """
        try:
            return self.apply([self._as_dict(message) for message in messages])
        # A template is a program that came with the model: whatever it raises is about these messages.
        except Exception as error:
            raise ChatTemplateError(f"the model's chat template refused the messages: {error}") from error

    def _as_dict(self, message: ChatMessage) -> dict[str, Any]:
        as_dict: dict[str, Any] = {"role": message.role, "content": self._content(message.content)}
        if message.name is not None:
            as_dict["name"] = message.name
        return as_dict

    def _content(self, content: str | Sequence[str]) -> str | list[dict[str, str]]:
        if isinstance(content, str):
            return content if self.takes_strings else [{"type": "text", "text": content}]
        if self.takes_parts:
            return [{"type": "text", "text": text} for text in content]
        return "\n".join(content)


def chat_template_of(tokenizer: Any) -> ChatTemplate | None:
    """The default chat template of a transformers tokenizer; None if it has none."""
    if tokenizer.chat_template is None:
        return None

    def apply(messages: list[dict[str, Any]]) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    takes_parts = _shows_probe(apply, [{"type": "text", "text": _PROBE}])
    return ChatTemplate(apply, takes_strings=_shows_probe(apply, _PROBE) or not takes_parts, takes_parts=takes_parts)


def _shows_probe(apply: Callable[[list[dict[str, Any]]], str], content: Any) -> bool:
    try:
        text = apply([{"role": "user", "content": content}])
    except Exception:  # see ChatTemplate.render
        return False
    # A template that knows only strings may print a list as Python would.
    return _PROBE in text and "'text'" not in text
