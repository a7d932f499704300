"""Text and log-probabilities of a continuation belong together, however its tokens were grouped on the way."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.continuation import Continuation, ScoredToken, TextDelta
from frontend.detokenizer import detokenizer_factory
from frontend.engine_errors import RequestRefusedError
from ipc.vocabulary import RequestOutput, TokenLogprob
from tests.frontend.test_detokenizer import TOKENIZERS

TOKENIZER = TOKENIZERS["byte_level"]
END = TOKENIZER.token_to_id("<|end|>")
ALPHABET = [
    *TOKENIZER.encode("the family 你好 👨‍👩‍👧 went home").ids,
    *(TOKENIZER.token_to_id(c) for c in "ðŁĻĤab"),
    END,
]


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def outputs(token_ids: list[int], cuts: list[int], finish: str) -> list[RequestOutput]:
    bounds = sorted({0, len(token_ids), *(cut for cut in cuts if cut < len(token_ids))})
    made = [
        RequestOutput("r", token_ids[a:b], logprobs=[TokenLogprob(i, -0.5, 1, []) for i in token_ids[a:b]])
        for a, b in itertools.pairwise(bounds)
    ]
    made[-1].finish_reason = finish
    return made


def deltas(continuation: Continuation, taken: list[RequestOutput]) -> list[TextDelta]:
    result = []
    for output in taken:
        result.append(continuation.take(output))
        if result[-1].finish_reason is not None:
            break
    return result


def new(stops: list[str], *, include_stop: bool = False) -> Continuation:
    return Continuation(detokenizer_factory(TOKENIZER)(), stops, include_stop=include_stop)


def all_scored(parts: list[TextDelta]) -> list[ScoredToken]:
    return [token for delta in parts for token in delta.scored_tokens]


@settings(max_examples=400, deadline=None)
@given(
    token_ids=st.lists(st.sampled_from(ALPHABET), min_size=1, max_size=20),
    cuts=st.lists(st.integers(1, 20), max_size=20),
    finish=st.sampled_from(["stop", "length"]),
    stops=st.lists(st.sampled_from(["the", "home", "好", "\ufffd", "a", "e f", "👧 w", "zz"]), max_size=3),
    include_stop=st.booleans(),
)
def test_however_tokens_come_text_counts_and_log_probabilities_are_the_same(
    token_ids: list[int], cuts: list[int], finish: str, stops: list[str], include_stop: bool
) -> None:
    whole = deltas(new(stops, include_stop=include_stop), outputs(token_ids, [], finish))
    parts = deltas(new(stops, include_stop=include_stop), outputs(token_ids, cuts, finish))
    text = "".join(delta.text for delta in parts)
    assert text == whole[0].text
    assert all_scored(parts) == all_scored(whole)
    assert parts[-1].finish_reason == whole[0].finish_reason
    assert parts[-1].stop_reason == whole[0].stop_reason
    num_tokens = sum(delta.num_tokens for delta in parts)
    assert num_tokens == whole[0].num_tokens
    scored = all_scored(parts)
    assert [token.token_id for token in scored] == token_ids[: len(scored)]
    if parts[-1].stop_reason is None:
        assert len(scored) == num_tokens == len(token_ids)
    else:
        assert all(token.text_offset < len(text) for token in scored)
    # Each came with the piece of text in which its own begins.
    end = 0
    for delta in parts:
        start, end = end, end + len(delta.text)
        assert all(token.text_offset < end or delta is parts[-1] for token in delta.scored_tokens)
        assert all(token.text_offset >= start for token in delta.scored_tokens)


def test_what_a_stop_string_cuts_off_has_no_log_probability() -> None:
    token_ids = [token for word in (" went", " home", " the", " family") for token in ids(word)]
    (delta,) = deltas(new(["ome t"]), outputs(token_ids, [], "length"))
    assert (delta.text, delta.stop_reason, delta.num_tokens) == (" went h", "ome t", 3)
    # The token that is cut in two is still one whose text begins in the text.
    assert [(token.text_offset, TOKENIZER.decode([token.token_id])) for token in delta.scored_tokens] == [
        (0, " went"),
        (5, " home"),
    ]


def test_a_stop_string_can_be_part_of_the_text() -> None:
    token_ids = [*ids(" went"), *ids(" home"), *ids(" the")]
    parts = deltas(new(["home"], include_stop=True), outputs(token_ids, [1], "length"))
    assert [(delta.text, delta.stop_reason, len(delta.scored_tokens)) for delta in parts] == [
        (" went", None, 1),
        (" home", "home", 1),
    ]


@pytest.mark.parametrize(("include_stop", "text"), [(False, " went"), (True, " went home")])
def test_a_token_that_ends_the_sequence_is_counted_and_scored_and_shown_only_if_wanted(
    include_stop: bool, text: str
) -> None:
    token_ids = [*ids(" went"), *ids(" home")]
    (output,) = outputs(token_ids, [], "stop")
    output.stop_reason = token_ids[-1]
    delta = new([], include_stop=include_stop).take(output)
    assert (delta.text, delta.num_tokens, delta.stop_reason) == (text, 2, token_ids[-1])
    assert [token.text_offset for token in delta.scored_tokens] == [0, 5]


def test_the_tokens_of_one_character_come_with_it() -> None:
    token_ids = [TOKENIZER.token_to_id(byte) for byte in "ðŁĻĤ"] + ids("a")
    parts = deltas(new([]), outputs(token_ids, [1, 2, 3, 4], "length"))
    assert [(delta.text, [token.text_offset for token in delta.scored_tokens]) for delta in parts[-3:]] == [
        ("", []),
        ("🙂", [0] * (len(token_ids) - 1)),
        ("a", [1]),
    ]


def test_without_log_probabilities_there_are_none() -> None:
    assert list(new([]).take(RequestOutput("r", ids("the home"))).scored_tokens) == []


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_engine_that_gives_up_is_no_end_of_text(reason: str) -> None:
    with pytest.raises(RequestRefusedError):
        new([]).take(RequestOutput("r", [], finish_reason=reason))
