"""What an API shows of a choice: its text, and apart from it the calls of tools in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from .continuation import ScoredToken, TextDelta
from .prompt.chat_template import ChatTemplate
from .tool_calls import ToolCallScanner, WrittenCall

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class CallableTools:
    """Tools whose calls are looked for in an answer; without `in_parallel` those after the first are left out."""

    names: frozenset[str]
    in_parallel: bool


def callable_tools(template: ChatTemplate | None, names: Collection[str], *, in_parallel: bool) -> CallableTools | None:
    """None where an answer is text, whatever is in it: no tool may be called, or the model has its own way to do it."""
    if not names or template is None or not template.tags_tool_calls:
        return None
    return CallableTools(frozenset(names), in_parallel)


@dataclass(slots=True)
class Part:
    """Of a choice: text, a call, or the end without either. `scored_tokens` are those that begin in it or before."""

    text: str = ""
    call: WrittenCall | None = None
    scored_tokens: Sequence[ScoredToken] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class ChoiceReader:
    """Divides what one choice says into parts. The last one has the `finish_reason`, and no other."""

    def __init__(self, tools: CallableTools | None) -> None:
        self._tools = tools
        self._scanner = ToolCallScanner(() if tools is None else tools.names)
        self._scored: deque[ScoredToken] = deque()
        self._num_calls = 0

    def read(self, delta: TextDelta) -> list[Part]:
        """The parts that `delta` completes: none while what it adds may still become a call."""
        if self._tools is None:
            if not delta.text and delta.finish_reason is None:
                return []
            return [Part(delta.text, None, delta.scored_tokens, delta.finish_reason, delta.stop_reason)]
        self._scored += delta.scored_tokens
        pieces = self._scanner.push(delta.text)
        if delta.finish_reason is not None:
            pieces += self._scanner.flush()
        parts: list[Part] = []
        for piece in pieces:
            if isinstance(piece.value, str):
                parts.append(Part(piece.value, None, self._scored_before(piece.end)))
            elif self._tools.in_parallel or not self._num_calls:
                parts.append(Part("", piece.value, self._scored_before(piece.end)))
                self._num_calls += 1
        if delta.finish_reason is not None:
            is_asking = self._num_calls and delta.finish_reason == "stop"
            reason: FinishReason = "tool_calls" if is_asking else delta.finish_reason
            parts.append(Part("", None, list(self._scored), reason, delta.stop_reason))
        return parts

    def _scored_before(self, end: int) -> list[ScoredToken]:
        scored = []
        while self._scored and self._scored[0].text_offset < end:
            scored.append(self._scored.popleft())
        return scored
