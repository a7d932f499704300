"""What a person sees: answers on standard output, everything about them on standard error."""

from __future__ import annotations

import sys
from typing import Literal

from rich.console import Console
from rich.text import Text

from frontend.openai_client import Answer

# All control characters but tab and newline: an answer must not move the cursor or rename the window.
_CONTROL = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])


class Screen:
    """Colours and the removal of control characters are for terminals; what is redirected stays as it came."""

    def __init__(self) -> None:
        self._notes = Console(stderr=True, highlight=False)
        # A locale may have no letter for what a model says; standard error knows what to do by itself.
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
        self._is_terminal = sys.stdout.isatty()
        self._at_line_start = True
        self._reasoning = False

    def read_line(self, prompt: str) -> str:
        """One line, edited where the terminal allows it. Raises EOFError, KeyboardInterrupt."""
        if self._is_terminal:
            return input(prompt)
        self._notes.print(prompt, end="")
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def show(self, kind: Literal["answer", "reasoning"], text: str) -> None:
        """Add to the answer. Reasoning goes where notes go, since it is no part of the answer."""
        if kind == "reasoning":
            self._notes.print(Text(text.translate(_CONTROL)), style="dim italic", end="", soft_wrap=True)
            self._reasoning = True
            return
        self._end_reasoning()
        sys.stdout.write(text.translate(_CONTROL) if self._is_terminal else text)
        sys.stdout.flush()
        self._at_line_start = text.endswith("\n")

    def end_answer(self) -> None:
        self._end_reasoning()
        if not self._at_line_start:
            sys.stdout.write("\n")
            sys.stdout.flush()
        self._at_line_start = True

    def end_prompt(self) -> None:
        """Leave the line on which the person ended something."""
        self._notes.print()

    def note(self, text: str) -> None:
        self._notes.print(Text(text.translate(_CONTROL)), style="dim", soft_wrap=True)

    def error(self, text: str) -> None:
        self._notes.print(Text(f"foreword: {text.translate(_CONTROL)}"), style="red", soft_wrap=True)

    def _end_reasoning(self) -> None:
        if self._reasoning:
            self._notes.print()
        self._reasoning = False


def cost(answer: Answer, *, stopped: bool = False) -> str:
    """One line about what an answer took: "30 prompt tokens: 16 cached + 14 new · 9 generated · TTFT 52 ms · 20 tok/s".

    What the server does not report is left out, and so are pictures' tokens where there are none.
    """
    parts: list[str] = []
    if usage := answer.usage:
        prompt = f"{usage.prompt_tokens:,} prompt tokens"
        if usage.cached_tokens is not None:
            new = usage.prompt_tokens - usage.cached_tokens
            prompt += f": {usage.cached_tokens:,} cached + {new:,} new"
        if usage.image_tokens:
            prompt += f" ({usage.image_tokens:,} of pictures)"
        parts += [prompt, f"{usage.completion_tokens:,} generated"]
    if answer.ttft_s is not None:
        parts.append(f"TTFT {1e3 * answer.ttft_s:,.0f} ms")
    if answer.decode_tokens_per_s is not None:
        parts.append(f"{answer.decode_tokens_per_s:,.1f} tok/s")
    if stopped:
        parts.append("stopped")
    elif answer.finish_reason == "length":
        parts.append("cut off: out of tokens")
    return " · ".join(parts)
