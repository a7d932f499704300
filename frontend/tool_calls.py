"""Calls of tools in what a model says: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

Found as the text arrives, and of it no more is held back than could still become a call.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import msgspec
from msgspec import Raw

TAGS = OPENING_TAG, CLOSING_TAG = "<tool_call>", "</tool_call>"

_JSON_SPACE = " \t\n\r"


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call of the tool `name`. `arguments` is a JSON object, spelled as the model did."""

    name: str
    arguments: str


@dataclass(slots=True)
class Piece:
    """A part of what was said: text, or a call. `end`: how many characters had been read up to its end."""

    value: str | WrittenCall
    end: int


class ToolCallScanner:
    """Separates the calls in a text that arrives in pieces from the rest of it.

    A call is one if a tool of `names` is called with a JSON object (none at all is an empty one) and both tags are
    there. Whatever else looks like one is text, character by character. White space beside a call is left out where the
    rest of the text would begin or end with it. The outcome does not depend on how the text was cut. Work is linear in
    its length.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        # What may yet be left out or become a call: white space, then the beginning of a tag or all of a call so far.
        self._space = ""
        self._tag = ""
        self._call: _CallReader | None = None
        self._pieces: list[Piece] = []
        # In characters, `_tag` and `_call` not included.
        self._num_read = 0
        self._has_text = self._has_calls = False

    def push(self, text: str) -> list[Piece]:
        """Take more text; return what has become certain."""
        self._scan(text)
        return self._take_pieces()

    def flush(self) -> list[Piece]:
        """The text has ended: return what was held back. The scanner is spent."""
        while self._call is not None:
            self._scan(self._give_up(self._call))
        self._add_text(self._tag)
        if self._space and not self._has_calls:
            self._pieces.append(Piece(self._space, self._num_read))
        return self._take_pieces()

    def _scan(self, text: str) -> None:
        text, self._tag = self._tag + text, ""
        place = 0
        while place < len(text):
            if self._call is None:
                place = self._scan_text(text, place)
            else:
                text, place = self._scan_call(self._call, text, place)

    def _scan_text(self, text: str, place: int) -> int:
        """Reads `text` from `place` up to behind the next opening tag. Returns that place."""
        start = text.find(OPENING_TAG, place)
        if start < 0:
            self._tag = _beginning_of_tag(text[place:])
            self._add_text(text[place : len(text) - len(self._tag)])
            return len(text)
        self._add_text(text[place:start])
        self._call = _CallReader()
        return start + len(OPENING_TAG)

    def _scan_call(self, call: _CallReader, text: str, place: int) -> tuple[str, int]:
        """Reads `text` from `place` up to where it is known whether this is a call. Returns what is to be read next."""
        end = call.read(text, place)
        if call.state == "complete":
            if (written := _written_call(call.json, self._names)) is not None:
                self._call = None
                self._num_read += len(OPENING_TAG) + len(call.text)
                self._has_calls = True
                self._pieces.append(Piece(written, self._num_read))
                return text, end
        elif call.state != "failed":
            return text, end
        read_again = self._give_up(call)
        # Mostly all of it is in `text`: then the rest is not copied, however many tags follow one another.
        return (text, place) if call.is_read_at_once else (read_again + text[end:], 0)

    def _give_up(self, call: _CallReader) -> str:
        """It is none, so its tag is text. Returns what followed that, which is to be read again."""
        self._call = None
        self._add_text(OPENING_TAG)
        return call.text

    def _add_text(self, text: str) -> None:
        self._num_read += len(text)
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            if self._has_calls and not self._has_text:
                shown = shown.lstrip()
            self._has_text = True
            self._pieces.append(Piece(shown, self._num_read - len(self._space)))

    def _take_pieces(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        taken: list[Piece] = []
        for is_text, group in groupby(pieces, lambda piece: isinstance(piece.value, str)):
            alike = list(group)
            if is_text:
                alike = [Piece("".join(str(piece.value) for piece in alike), alike[-1].end)]
            taken += alike
        return taken


class _CallReader:
    """Reads what follows an opening tag, up to the end of its closing tag or where it cannot become a call any more.

    That is certain early, so that a text that merely mentions the tag is not held back to its end: behind the tag comes
    an object, outside of whose strings there is neither `<` nor a backslash, and inside no control character.
    """

    def __init__(self) -> None:
        self.state: Literal["space", "object", "closing", "complete", "failed"] = "space"
        self._texts: list[str] = []
        self._num_characters = 0
        self._start = self._end = 0
        self._depth = 0
        self._is_in_string = self._is_escaped = False
        self._num_closing = 0

    @property
    def text(self) -> str:
        """All that was read."""
        return "".join(self._texts)

    @property
    def json(self) -> str:
        """The object, once it was read."""
        return self.text[self._start : self._end]

    @property
    def is_read_at_once(self) -> bool:
        return len(self._texts) == 1

    def read(self, text: str, place: int) -> int:
        """Reads `text` from `place` up to where the outcome is known. Returns that place."""
        end = place
        while end < len(text) and self.state not in {"complete", "failed"}:
            self._read_character(text[end])
            end += 1
        self._texts.append(text[place:end])
        return end

    def _read_character(self, character: str) -> None:
        if self.state == "object":
            self._read_in_object(character)
        elif self.state == "space":
            if character == "{":
                self.state, self._start, self._depth = "object", self._num_characters, 1
            elif character not in _JSON_SPACE:
                self.state = "failed"
        elif character == CLOSING_TAG[self._num_closing]:
            self._num_closing += 1
            if self._num_closing == len(CLOSING_TAG):
                self.state = "complete"
        elif self._num_closing or character not in _JSON_SPACE:
            self.state = "failed"
        self._num_characters += 1

    def _read_in_object(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == '"':
            self._is_in_string = not self._is_in_string
        elif self._is_in_string:
            self._is_escaped = character == "\\"
            if character < " ":
                self.state = "failed"
        elif character in "<\\":
            self.state = "failed"
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if not self._depth:
                self.state, self._end = "closing", self._num_characters + 1


class _Call(msgspec.Struct):
    name: str
    arguments: Raw = Raw(b"{}")


def _written_call(json: str, names: Collection[str]) -> WrittenCall | None:
    try:
        call = msgspec.json.decode(json, type=_Call)
        # A struct's undecoded field was only skimmed.
        is_object = isinstance(msgspec.json.decode(call.arguments), dict)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return WrittenCall(call.name, bytes(call.arguments).decode()) if is_object and call.name in names else None


def calls_in(text: str, names: Collection[str]) -> Sequence[WrittenCall]:
    """The calls in a whole text, in their order."""
    scanner = ToolCallScanner(names)
    pieces = [*scanner.push(text), *scanner.flush()]
    return [piece.value for piece in pieces if isinstance(piece.value, WrittenCall)]


def _beginning_of_tag(text: str) -> str:
    """The end of `text` that could be the beginning of an opening tag."""
    start = text.rfind(OPENING_TAG[0], -len(OPENING_TAG) + 1)
    return text[start:] if start >= 0 and OPENING_TAG.startswith(text[start:]) else ""
