"""Calls of tools in a text: what is one, what stays text, and that it does not matter how the text arrives."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.tool_calls import ToolCallScanner, WrittenCall, calls_in

NAMES = frozenset({"weather", "clock"})
ULM = WrittenCall("weather", '{"city": "Ulm"}')
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'


def scan(*texts: str) -> tuple[str, list[WrittenCall]]:
    """The text that is left of `texts`, and the calls in it."""
    scanner = ToolCallScanner(NAMES)
    values = [piece.value for text in texts for piece in scanner.push(text)]
    values += [piece.value for piece in scanner.flush()]
    left = "".join(value for value in values if isinstance(value, str))
    return left, [value for value in values if isinstance(value, WrittenCall)]


def in_tags(json: str) -> str:
    return f"<tool_call>{json}</tool_call>"


@pytest.mark.parametrize(
    ("text", "left", "calls"),
    [
        (CALL, "", [ULM]),
        ("\n" + CALL + "\n", "", [ULM]),
        ("Let me see.\n" + CALL, "Let me see.", [ULM]),
        (CALL + "\nThat was it. ", "That was it.", [ULM]),
        ("First: " + CALL + " then: " + CALL, "First:  then:", [ULM, ULM]),
        (CALL + "\n" + CALL + CALL, "", [ULM, ULM, ULM]),
        (in_tags('{"arguments":{ "b":1.0,"a" :[] },"name":"clock"}'), "",
         [WrittenCall("clock", '{ "b":1.0,"a" :[] }')]),
        (in_tags('{"name": "clock", "arguments": {"x": {"b": 1, "a": 2}, "y": "\\u00e9é"}}'), "",
         [WrittenCall("clock", '{"x": {"b": 1, "a": 2}, "y": "\\u00e9é"}')]),
        (in_tags('{"name": "clock"}'), "", [WrittenCall("clock", "{}")]),
        (in_tags('{"id": 7, "name": "clock", "arguments": {}}'), "", [WrittenCall("clock", "{}")]),
        (in_tags('{"name": "clock", "arguments": {"x": "</tool_call> <tool_call> {\\"}"}}'), "",
         [WrittenCall("clock", '{"x": "</tool_call> <tool_call> {\\"}"}')]),
    ],
)  # fmt: skip
def test_calls_are_taken_out_of_the_text(text: str, left: str, calls: list[WrittenCall]) -> None:
    assert scan(text) == (left, calls)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  no call \n",
        "<tool_call>",
        "<tool_call>\n",
        "a <tool_cal",
        "a <",
        "<<tool_call >" + CALL[11:],
        CALL.removesuffix(">"),
        CALL.removesuffix("</tool_call>"),
        CALL.replace("</tool_call>", "<tool_call>"),
        CALL.replace("\n<", "x\n<"),
        CALL.replace("}}", "}"),
        CALL.replace("}}", "}}}"),
        CALL.replace("weather", "wether"),
        CALL.replace('"name"', '"function"'),
        CALL.replace('"weather"', "null"),
        CALL.replace('"weather"', "'weather'"),
        CALL.replace("Ulm", "Ulm\n"),
        CALL.replace("Ulm", "\\ud83d"),
        CALL.replace('"Ulm"', "1e400"),
        CALL.replace('"Ulm"', "01"),
        CALL.replace('"Ulm"', '"Ulm",'),
        CALL.replace('"Ulm"', "[" * 5000 + "]" * 5000),
        CALL.replace("{", "[", 1),
        in_tags('["weather", {"city": "Ulm"}]'),
        in_tags('{"name": "weather", "arguments": "{\\"city\\": \\"Ulm\\"}"}'),
        in_tags('{"name": "weather", "arguments": null}'),
        in_tags('{"name": "weather", "arguments": [1]}'),
        in_tags('{"name": "weather", "arguments": {"city": "Ulm"}} {}'),
        in_tags("weather(city='Ulm')"),
        in_tags(""),
    ],
)
def test_everything_else_is_text(text: str) -> None:
    assert scan(text) == (text, [])
    assert scan(*text) == (text, [])


@pytest.mark.parametrize("broken", ["<tool_call>", in_tags("{}"), CALL[:-13], '<tool_call>{"x": "', "<tool_call>{"])
def test_a_call_behind_what_is_none_is_found(broken: str) -> None:
    assert scan(broken + "\n" + CALL) == (broken, [ULM])
    assert scan(CALL + broken) == (broken, [ULM])


FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "<tool",
    '{"name": "clock"',
    ', "arguments": {',
    '"x": "',
    CALL,
    "Hi.",
    "\u2003",
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.sampled_from('<>{}[]"\\, \n\u2003'), max_size=12).map("".join)


@given(text=TEXTS, cuts=st.lists(st.integers(0, 200)))
def test_it_does_not_matter_how_the_text_is_cut(text: str, cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    whole = scan(text)
    assert scan(*(text[start:end] for start, end in pairwise(places))) == whole
    assert scan(*text) == whole
    if not whole[1]:
        assert whole[0] == text


@pytest.mark.parametrize("text", ["Hi <b>there</b>, <tool_", CALL[:40], "The tag is <tool_call>, not"])
def test_no_more_is_held_back_than_could_become_a_call(text: str) -> None:
    scanner = ToolCallScanner(NAMES)
    shown = ""
    for end, character in enumerate(text, start=1):
        shown += "".join(str(piece.value) for piece in scanner.push(character))
        held = text[len(shown) : end]
        assert text[:end] == shown + held
        # White space might stand before a call, a beginning of one is one.
        assert not held.strip() or scan(held.lstrip() + CALL[len(held.lstrip()) :])[1]


@pytest.mark.parametrize(
    "text",
    ["<tool_call> is", '<tool_call>{"x": </', '<tool_call>{\\"x', '<tool_call>{"x": "\no', '<tool_call>{"x": 1}x'],
)
def test_what_cannot_become_a_call_any_more_is_shown_at_once(text: str) -> None:
    assert "".join(str(piece.value) for piece in ToolCallScanner(NAMES).push(text)) == text


def test_a_piece_knows_how_far_the_text_had_been_read() -> None:
    text = f" Well:\n{CALL}\nAnd\n{CALL}"
    scanner = ToolCallScanner(NAMES)
    pieces = [piece for character in text for piece in scanner.push(character)]
    calls = [piece.end for piece in pieces if isinstance(piece.value, WrittenCall)]
    assert calls == [len(f" Well:\n{CALL}"), len(text)]
    ends = [piece.end for piece in pieces]
    assert ends == sorted(ends)
    assert [text[end - 1] for end in ends] == [*"Well:", ">", *"And", ">"]


@pytest.mark.parametrize("text", ["<tool_call>" * 20_000, '<tool_call>{"' + "<tool_call>" * 20_000, CALL * 4_000])
@pytest.mark.parametrize("group", [4, 1_000_000])
def test_long_texts_take_no_time(text: str, group: int) -> None:
    assert len(scan(*(text[at : at + group] for at in range(0, len(text), group)))[1]) == text.count(CALL)


def test_the_calls_of_a_whole_text() -> None:
    assert calls_in(f"a {CALL} b {CALL} c", NAMES) == [ULM, ULM]
    assert calls_in(CALL, ["clock"]) == []
