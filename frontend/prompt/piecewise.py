"""Texts are tokenized in pieces, and pieces that came before are not tokenized again: a chat costs what is new in it.

Exact by construction: see `cuts`. Nothing that one tenant sent is used for another.

Which tokens a place of the text has is read off where the tokens of its pieces are, which is remembered like these.
"""

from __future__ import annotations

import sys
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeVar

from tokenizers import Encoding, Tokenizer

from multimodal.byte_lru import ByteLRU

from .cuts import cuts_of
from .place_offsets import PlaceOffsets
from .places import TokenRange
from .stable_tokens import stable_tokens_of

T = TypeVar("T")

# Shorter ones save too little for what an entry weighs and takes to find.
MIN_PIECE_CHARACTERS = 256
# About 400 chats of 8,192 tokens.
MAX_BYTES = 32 << 20
# Of these, for where tokens are.
_OFFSETS_SHARE = 1 / 8

_NUMBER_BYTES = 4


@dataclass(slots=True)
class TokenizationStats:
    """Tokens of all texts, and those of them that were remembered."""

    num_tokens: int = 0
    num_remembered_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SplitText:
    """The pieces of a tenant's text, and the tokens of those that are known. The last one never is."""

    tenant: str
    pieces: Sequence[str]
    known: Sequence[array[int] | None]

    @property
    def num_unknown_characters(self) -> int:
        return sum(len(piece) for piece, token_ids in zip(self.pieces, self.known, strict=True) if token_ids is None)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Of a text. `ranges` are those of the places that were asked for, in their order."""

    ids: list[int]
    ranges: Sequence[TokenRange]


class PiecewiseTokenizer:
    """Gives the tokens that `tokenizer` gives. From any thread.

    At most `max_bytes` are remembered, of all tenants together; the least recently used make room. A text's last piece
    is not: it is what grows.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_bytes: int = MAX_BYTES) -> None:
        self.stats = TokenizationStats()
        self._tokenizer = tokenizer
        self._cuts = cuts_of(tokenizer)
        self._stable = stable_tokens_of(tokenizer, self._cuts)
        for_offsets = int(max_bytes * _OFFSETS_SHARE)
        self._remembered: ByteLRU[tuple[str, str], array[int]] = ByteLRU(max_bytes - for_offsets)
        self._remembered_offsets: ByteLRU[tuple[str, str], TokenOffsets] = ByteLRU(for_offsets)
        self._lock = threading.Lock()

    def split(self, text: str, tenant: str) -> SplitText:
        """Find what is known of `text`: about 1 ms for a million characters."""
        if self._cuts is None:
            return SplitText(tenant, [text], [None])
        pieces = list(self._cuts.pieces(text, MIN_PIECE_CHARACTERS))
        with self._lock:
            known = [self._remembered.get((tenant, piece)) for piece in pieces[:-1]]
        return SplitText(tenant, pieces, [*known, None])

    def tokenize(
        self,
        text: SplitText,
        *,
        add_special_tokens: bool,
        check_number: Callable[[int], None],
        places: Sequence[PlaceOffsets] = (),
    ) -> Tokens:
        """Tokenize what is not known; `add_special_tokens` adds what the tokenizer puts around a bare text (BOS).

        Special tokens spelled out in the text become special tokens. `check_number` is told how many tokens there are;
        what it raises ends this, and nothing is remembered. The interpreter lock is released for most of it, but for
        listing them (20 ms for a million).

        Of each of `places` come the tokens; those before its `start` are sure, whatever stands there (`stable_tokens`).
        """
        if not places:
            return Tokens(self._tokenize(text, add_special_tokens, check_number, frozenset()).ids, ())
        whole = "".join(text.pieces)
        settled = [place._replace(start=self._stable.end(whole, place.start)) for place in places]
        begins = list(accumulate(map(len, text.pieces), initial=0))
        offsets = {offset for place in settled for offset in place}.difference(begins)
        tokenized = self._tokenize(
            text, add_special_tokens, check_number, {bisect_right(begins, offset) - 1 for offset in offsets}
        )

        def number_of_tokens(offset: int, number_in: Callable[[TokenOffsets, int], int]) -> int:
            piece = bisect_right(begins, offset) - 1
            before, inside = tokenized.begins[piece], offset - begins[piece]
            return before + (number_in(tokenized.offsets[piece], inside) if inside else 0)

        ranges = []
        for start, shown, end in settled:
            first = number_of_tokens(shown, _number_that_end)
            last = number_of_tokens(end, _number_that_begin) if end > shown else first
            ranges.append(TokenRange(number_of_tokens(start, _number_that_end), first, last))
        return Tokens(tokenized.ids, ranges)

    def _tokenize(
        self, text: SplitText, add_special_tokens: bool, check_number: Callable[[int], None], looked_at: Set[int]
    ) -> _Tokenized:
        """`looked_at`: the pieces of which it matters where their tokens are."""
        # encode() keeps the interpreter lock for its whole run (0.9 s for 1 MB); this one releases it.
        encode, encode_with_offsets = self._tokenizer.encode_batch_fast, self._tokenizer.encode_batch
        prefix, suffix = (self._cuts.prefix, self._cuts.suffix) if self._cuts and add_special_tokens else ((), ())
        if self._cuts is None or (len(text.pieces) == 1 and not looked_at):
            encode = encode_with_offsets if looked_at else encode
            (encoding,) = encode(text.pieces, add_special_tokens=add_special_tokens)
            check_number(len(encoding))
            self._count(len(encoding), 0)
            offsets = {0: _offsets(encoding)} if looked_at else {}
            return _Tokenized(encoding.ids, [len(prefix), len(encoding) - len(suffix)], offsets)
        offsets = {i: kept for i in looked_at if (kept := self._known_offsets(text, i)) is not None}
        with_offsets = sorted(looked_at - offsets.keys())
        without = [piece for piece, ids in enumerate(text.known) if ids is None and piece not in with_offsets]
        encodings: dict[int, Encoding] = {}
        for pieces, encode_them in ((with_offsets, encode_with_offsets), (without, encode)):
            texts = [text.pieces[piece] for piece in pieces]
            encodings |= zip(pieces, encode_them(texts, add_special_tokens=False))
        numbers = [len(encodings[i]) if known is None else len(known) for i, known in enumerate(text.known)]
        begins = list(accumulate(numbers, initial=len(prefix)))
        check_number(begins[-1] + len(suffix))
        self._count(begins[-1] + len(suffix), sum(len(known) for known in text.known if known is not None))
        whole = array("I", prefix)
        for piece in with_offsets:
            offsets[piece] = new_offsets = _offsets(encodings[piece])
            self._remember(self._remembered_offsets, text, piece, new_offsets, sum(map(len, new_offsets)))
        for piece, known in enumerate(text.known):
            if known is not None:
                whole += known
                continue
            whole += (new := array("I", encodings[piece].ids))
            self._remember(self._remembered, text, piece, new, len(new))
        whole.extend(suffix)
        return _Tokenized(whole.tolist(), begins, offsets)

    def _count(self, num_tokens: int, num_known: int) -> None:
        with self._lock:
            self.stats.num_tokens += num_tokens
            self.stats.num_remembered_tokens += num_known

    def _known_offsets(self, text: SplitText, piece: int) -> TokenOffsets | None:
        with self._lock:
            return self._remembered_offsets.get((text.tenant, text.pieces[piece]))

    def _remember(
        self, memory: ByteLRU[tuple[str, str], T], text: SplitText, piece: int, value: T, num_numbers: int
    ) -> None:
        if piece == len(text.pieces) - 1:
            return
        key = (text.tenant, text.pieces[piece])
        with self._lock:
            memory.put(key, value, sum(map(sys.getsizeof, key)) + _NUMBER_BYTES * num_numbers)


class TokenOffsets(NamedTuple):
    """The characters from which and up to which each token of a piece goes. Both ascend."""

    begins: array[int]
    ends: array[int]


@dataclass(frozen=True, slots=True)
class _Tokenized:
    """`begins`: how many tokens there are before each piece, and behind the last one. `offsets`: those in a piece."""

    ids: list[int]
    begins: Sequence[int]
    offsets: Mapping[int, TokenOffsets]


def _offsets(encoding: Encoding) -> TokenOffsets:
    """Some tokenizers leave whitespace out: here a token begins no later than where those before it end.

    What is put around a text has no place in it, and ends where others do.
    """
    begins, ends = array("I"), array("I")
    last_begin = last_end = 0
    for begin, end in encoding.offsets:
        begins.append(last_begin := max(last_begin, min(begin, last_end)))
        ends.append(last_end := max(last_end, end))
    return TokenOffsets(begins, ends)


def _number_that_end(tokens: TokenOffsets, offset: int) -> int:
    return bisect_right(tokens.ends, offset)


def _number_that_begin(tokens: TokenOffsets, offset: int) -> int:
    return bisect_left(tokens.begins, offset)
