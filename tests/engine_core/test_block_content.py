"""What of two blocks is the same: tokens, and extra keys with their places."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from engine_core.kv_cache.block_content import block_contents, num_common_tokens, partial_content, sort_bytes
from ipc.vocabulary import ExtraKeySpan

B = 4


def content(tokens: list[int], *spans: ExtraKeySpan, start: int = 0):
    return partial_content([0] * start + tokens, spans, start, start + len(tokens), B)


def common(one, other) -> int:
    assert num_common_tokens(one, other) == num_common_tokens(other, one)
    return num_common_tokens(one, other)


def test_tokens_are_compared_up_to_the_first_that_differs():
    assert common(content([1, 2, 3, 4]), content([1, 2, 3, 4])) == 4
    assert common(content([1, 2, 3, 4]), content([1, 2, 9, 4])) == 2
    assert common(content([1, 2]), content([1, 2, 3])) == 2
    assert common(content([256, 2]), content([1, 2])) == 0, "in whole tokens, not bytes"
    assert common(content([]), content([1])) == 0


def test_a_picture_is_shared_as_far_as_it_is_the_same():
    cat, dog = ExtraKeySpan(1, 3, "mm", "cat"), ExtraKeySpan(1, 3, "mm", "dog")
    later = ExtraKeySpan(2, 4, "mm", "cat")
    tokens = [7, 8, 8, 9]
    assert common(content(tokens, cat), content(tokens, cat)) == 4
    assert common(content(tokens, cat), content(tokens, dog)) == 1
    assert common(content(tokens, cat), content(tokens, later)) == 1
    assert common(content(tokens, cat), content(tokens)) == 1
    assert common(content(tokens, cat), content([7, 8], cat)) == 2, "a hit may end inside it"


def test_a_picture_that_began_before_the_block_has_to_be_as_far():
    tokens = [8, 8, 8, 9]
    one, other = ExtraKeySpan(3, 7, "mm", "cat"), ExtraKeySpan(2, 7, "mm", "cat")
    assert common(content(tokens, one, start=4), content(tokens, one, start=4)) == 4
    assert common(content(tokens, one, start=4), content(tokens, other, start=4)) == 0


def test_a_salt_is_never_crossed():
    salted = [ExtraKeySpan(2, 3, "cache_salt", key) for key in ("a", "b")]
    tokens = [1, 2, 3, 4]
    assert common(content(tokens, salted[0]), content(tokens, salted[1])) == 2
    assert common(content(tokens, salted[0]), content(tokens)) == 2
    assert common(content(tokens, salted[0]), content(tokens, ExtraKeySpan(2, 3, "mm", "a"))) == 2


def test_spans_of_one_kind_that_end_apart_are_the_same_up_to_the_first_end():
    tokens = [1, 2, 3, 4]
    short, long = (ExtraKeySpan(0, end, "mine", "x") for end in (2, 3))
    assert common(content(tokens, short), content(tokens, long)) == 2
    assert common(content(tokens, ExtraKeySpan(0, None, "lora", "x")), content(tokens[:3])) == 0


def test_pictures_of_one_place_keep_their_order():
    spans = [ExtraKeySpan(0, 4, "mm", key) for key in ("cat", "dog")]
    assert common(content([8] * 4, *spans), content([8] * 4, *reversed(spans))) == 0


KEYS = st.sampled_from(["a", "b"])
SPANS = st.lists(
    st.builds(
        lambda start, length, kind, key: ExtraKeySpan(start, None if length is None else start + length, kind, key),
        st.integers(0, 7),
        st.none() | st.integers(1, 4),
        st.sampled_from(["cache_salt", "mine"]),
        KEYS,
    ),
    max_size=2,
    unique_by=lambda span: (span.kind, span.start),
)
TOKENS = st.lists(st.integers(0, 1), min_size=2 * B, max_size=2 * B)


def elements(tokens: list[int], spans: list[ExtraKeySpan], start: int, end: int) -> list[object]:
    """Of each token what decides its K/V, besides those before it."""
    return [
        (
            tokens[place],
            frozenset(
                (span.kind, span.key, place - span.start)
                for span in spans
                if span.start <= place and (span.end is None or place < span.end)
            ),
        )
        for place in range(start, end)
    ]


@given(TOKENS, TOKENS, SPANS, SPANS, st.integers(1, B), st.integers(1, B))
def test_what_is_common_is_what_a_comparison_token_by_token_says(
    one: list[int], other: list[int], one_spans: list, other_spans: list, one_len: int, other_len: int
):
    contents = [
        partial_content(tokens, spans, B, B + length, B)
        for tokens, spans, length in ((one, one_spans, one_len), (other, other_spans, other_len))
    ]
    pairs = zip(elements(one, one_spans, B, B + one_len), elements(other, other_spans, B, B + other_len))
    expected = 0
    for mine, theirs in pairs:
        if mine != theirs:
            break
        expected += 1
    assert common(*contents) == expected
    # And it shows in what is sorted by.
    for number in range(min(one_len, other_len) + 1):
        first, second = (sort_bytes(content, number) for content in contents)
        assert (first == second) == (number <= expected)
        assert all(sort_bytes(content).startswith(part) for content, part in zip(contents, (first, second)))


def test_what_others_have_under_their_salts_stands_between_no_two_of_ones_own():
    """Else how far apart two of one's own are told where another's stands between them, and so what it is."""

    def salted(salt: str, tokens: list[int]) -> bytes:
        return sort_bytes(partial_content([1, *tokens], [ExtraKeySpan(1, 2, "cache_salt", salt)], 0, B, B))

    rng = random.Random(0)
    whose = [rng.choice("abc") for _ in range(300)]
    order = sorted(whose, key=lambda salt: salted(salt, [rng.randrange(1000) for _ in range(B - 1)]))
    plain = sort_bytes(partial_content([1, 999, 999, 999], [], 0, B, B))
    assert [salt for salt, _ in itertools.groupby(order)] == list(dict.fromkeys(order))
    assert all(plain < salted(salt, [0, 0, 0]) for salt in whose)


@given(TOKENS, SPANS)
def test_whole_blocks_have_the_contents_of_their_parts(tokens: list[int], spans: list[ExtraKeySpan]):
    whole = block_contents(tokens, spans, 0, B)
    assert whole == [partial_content(tokens, spans, start, start + B, B) for start in (0, B)]
    assert block_contents(tokens[B:], spans, 1, B) == whole[1:]
