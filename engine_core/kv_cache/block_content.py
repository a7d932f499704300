"""What a KV block holds, as it is compared: token ids and extra keys, with where the keys' spans lie.

Two blocks with the same content after the same prefix hold the same K/V. A block without extra keys, the common kind,
is its token ids as bytes (`token_bytes.token_id_bytes`).
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple

from engine_core.request import Request
from ipc.vocabulary import ExtraKeySpan

from .spans import spans_by_block
from .token_bytes import TOKEN_BYTES, token_id_bytes


class KeySpan(NamedTuple):
    """A span, relative to the block's first token; `end` is cut at the content's end.

    Pictures that start together are one, with their `keys` in order. A picture's key decides how long it is, so that
    its end is not compared: it stands at the content's end.
    """

    kind: str
    start: int
    end: int
    keys: tuple[str | bytes, ...]


class KeyedContent(NamedTuple):
    tokens: bytes
    spans: tuple[KeySpan, ...]


Content = bytes | KeyedContent

_DIGEST_BYTES = 8
_DIGEST_KEY = os.urandom(16)

# What `sort_bytes` makes of a token with extra keys is more than the first and less than the second.
BEFORE_KEYED = b"\x80"
BEHIND_KEYED = b"\xff" * (_DIGEST_BYTES + 1)

# The kind of extra key that keeps tenants apart.
SALT = "cache_salt"

NOWHERE = 1 << 62


def block_contents(
    token_ids: Sequence[int], spans: Sequence[ExtraKeySpan], first: int, block_size: int
) -> list[Content]:
    """Of the whole blocks that `token_ids` fill, of which the first is block `first`.

    Raises:
        OverflowError: a token id is not within [0, 2^32).
    """
    start = first * block_size
    tokens = token_id_bytes(token_ids)
    size = TOKEN_BYTES * block_size
    contents: list[Content] = [tokens[at : at + size] for at in range(0, len(tokens), size)]
    if spans:
        for index, overlapping in enumerate(spans_by_block(spans, first, len(contents), block_size)):
            contents[index] = _with_spans(contents[index], overlapping, start + index * block_size)
    return contents


def partial_content(
    token_ids: Sequence[int], spans: Sequence[ExtraKeySpan], start: int, end: int, block_size: int
) -> Content:
    """Of the first tokens of a block, `[start, end)`; `start` is the block's.

    Raises:
        OverflowError: as `block_contents`.
    """
    tokens = token_id_bytes(token_ids[start:end])
    if not spans:
        return tokens
    [overlapping] = spans_by_block(spans, start // block_size, 1, block_size)
    return _with_spans(tokens, [span for span in overlapping if span.start < end], start)


def content_between(request: Request, start: int, end: int, block_size: int) -> Content:
    """As `partial_content`, of a request."""
    return partial_content(request.token_ids, request.extra_key_spans, start, end, block_size)


def _with_spans(tokens: Content, overlapping: Iterable[ExtraKeySpan], start: int) -> Content:
    assert isinstance(tokens, bytes)
    num_tokens = len(tokens) // TOKEN_BYTES

    spans: list[KeySpan] = []
    for span in overlapping:
        first = span.start - start
        end = num_tokens if span.end is None or span.kind == "mm" else min(span.end - start, num_tokens)
        keys: tuple[str | bytes, ...] = (span.key,)
        if span.kind == "mm" and spans and (spans[-1].kind, spans[-1].start) == ("mm", first):
            keys = spans.pop().keys + keys
        spans.append(KeySpan(span.kind, first, end, keys))
    return KeyedContent(tokens, tuple(spans)) if spans else tokens


def tokens_of(content: Content) -> bytes:
    """Its token ids as bytes, without extra keys."""
    return content if isinstance(content, bytes) else content.tokens


def num_content_tokens(content: Content) -> int:
    return len(tokens_of(content)) // TOKEN_BYTES


def spans_at(content: Content, place: int) -> list[KeySpan]:
    """The spans that cover a token."""
    spans = () if isinstance(content, bytes) else content.spans
    return [span._replace(end=place + 1) for span in spans if span.start <= place < span.end]


def salts_of(content: Content) -> list[KeySpan]:
    return [] if isinstance(content, bytes) else [span for span in content.spans if span.kind == SALT]


def salts_before(content: Content, end: int) -> list[KeySpan]:
    """The salts that cover tokens before `end`, as they stand there."""
    return [span._replace(end=min(span.end, end)) for span in salts_of(content) if span.start < end]


def num_common_tokens(one: Content, other: Content) -> int:
    """How many first tokens are equal, with the extra keys that cover them and their places in those keys' spans."""
    one_tokens, one_spans = (one, ()) if isinstance(one, bytes) else one
    other_tokens, other_spans = (other, ()) if isinstance(other, bytes) else other
    size = min(len(one_tokens), len(other_tokens))
    difference = int.from_bytes(one_tokens[:size], "little") ^ int.from_bytes(other_tokens[:size], "little")
    num_tokens = size // TOKEN_BYTES
    if difference:
        num_tokens = ((difference & -difference).bit_length() - 1) // (8 * TOKEN_BYTES)
    if one_spans or other_spans:
        num_tokens = min(num_tokens, _first_difference(one_spans, other_spans))
    return num_tokens


def _first_difference(one: Sequence[KeySpan], other: Sequence[KeySpan]) -> int:
    """The first token that is not covered by equal spans on both sides."""
    one_ends, other_ends = _ends(one), _ends(other)
    first = NOWHERE
    for where in one_ends.keys() | other_ends.keys():
        # As if all that are missing ended before they began: of equal spans there may be several.
        ends = zip_longest(one_ends.get(where, ()), other_ends.get(where, ()), fillvalue=max(0, where[1]))
        first = min([first, *(min(pair) for pair in ends if pair[0] != pair[1])])
    return first


def _ends(spans: Sequence[KeySpan]) -> dict[tuple[str, int, tuple[str | bytes, ...]], list[int]]:
    """Where spans end that start together and have equal keys, the last one first."""
    ends: dict[tuple[str, int, tuple[str | bytes, ...]], list[int]] = {}
    for span in reversed(spans):
        ends.setdefault((span.kind, span.start, span.keys), []).append(span.end)
    return ends


def sort_bytes(content: Content, num_tokens: int | None = None) -> bytes:
    """So that contents, or their first `num_tokens` tokens, can be sorted by common beginnings: 4 bytes for each token,
    after 8 for each extra key that covers it.

    What has the same extra keys stands together, behind what has none; so how something goes on under one salt never
    stands between two that go on under another. Digests of keys are this process's own: nobody can choose keys so that
    it does. What is equal here may, very rarely, not be equal.
    """
    ids = array("I", tokens_of(content))
    # The most significant byte first.
    ids.byteswap()
    tokens = ids.tobytes()[: None if num_tokens is None else num_tokens * TOKEN_BYTES]
    if not isinstance(content, KeyedContent):
        return tokens
    elements = [tokens[at : at + TOKEN_BYTES] for at in range(0, len(tokens), TOKEN_BYTES)]
    for span in reversed(content.spans):
        digest = _digest(span)
        for place in range(max(0, span.start), min(span.end, len(elements))):
            elements[place] = digest + elements[place]
    return b"".join(elements)


def _digest(span: KeySpan) -> bytes:
    """At least `BEFORE_KEYED`, as no token is: ids are below 2^31."""
    named = repr((span.kind, span.start, span.keys)).encode()
    digest = hashlib.blake2b(named, digest_size=_DIGEST_BYTES, key=_DIGEST_KEY).digest()
    return bytes((digest[0] | BEFORE_KEYED[0],)) + digest[1:]
