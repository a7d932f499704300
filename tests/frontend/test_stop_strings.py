"""Stop strings end a text at the same place however it was cut, and nothing of them is ever shown."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.stop_strings import StopStringScanner

LETTERS = st.text("ab", max_size=30)


def scan(stops: list[str], parts: list[str], *, include_stop: bool = False) -> tuple[list[str], str | None]:
    scanner = StopStringScanner(stops, include_stop=include_stop)
    shown = []
    for part in parts:
        text, stop = scanner.push(part)
        shown.append(text)
        if stop is not None:
            return shown, stop
    return [*shown, scanner.flush()], None


def obvious(stops: list[str], text: str) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


def cut(text: str, lengths: list[int]) -> list[str]:
    parts = []
    for length in lengths:
        parts.append(text[:length])
        text = text[length:]
    return [*parts, text]


@settings(max_examples=1000, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=6), max_size=4), LETTERS, st.lists(st.integers(0, 5), max_size=12))
def test_agrees_with_looking_at_the_text_one_character_at_a_time(
    stops: list[str], text: str, lengths: list[int]
) -> None:
    shown, stop = scan(stops, cut(text, lengths))
    assert ("".join(shown), stop) == obvious(stops, text)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=6), max_size=4), LETTERS, st.lists(st.integers(0, 5), max_size=12))
def test_with_the_stop_string_included_it_is_the_end_and_nothing_is_held_back(
    stops: list[str], text: str, lengths: list[int]
) -> None:
    before, stop = obvious(stops, text)
    parts = cut(text, lengths)
    shown, found = scan(stops, parts, include_stop=True)
    assert ("".join(shown), found) == (before + (stop or ""), stop)
    assert shown[:-1] == parts[: len(shown) - 1]


@settings(max_examples=500, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4), LETTERS)
def test_holds_back_exactly_what_could_become_a_stop_string(stops: list[str], text: str) -> None:
    scanner = StopStringScanner(stops)
    shown = ""
    for end, character in enumerate(text, start=1):
        part, stop = scanner.push(character)
        if stop is not None:
            return
        shown += part
        possible = [
            n
            for n in range(1, end + 1)
            if any(s != text[end - n : end] and s.startswith(text[end - n : end]) for s in stops)
        ]
        assert len(shown) == end - max(possible, default=0)


def test_the_first_stop_string_that_is_complete_wins() -> None:
    assert scan(["abcd", "bc"], ["xab", "cd"]) == (["x", "a"], "bc")
    assert scan(["bc", "abc"], ["xabc"]) == (["x"], "abc")


def test_without_stop_strings_everything_passes_at_once() -> None:
    assert scan([], ["a", "b"]) == (["a", "b", ""], None)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStringScanner(["a", ""])
