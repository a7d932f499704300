"""Texts are tokenized in pieces, and pieces that came before are not tokenized again: a chat costs what is new in it.

Exact by construction: see `cuts`. Nothing that one tenant sent is used for another.

Which tokens a place of the text has is read off where the tokens of its pieces end, and remembered like these.
"""

from __future__ import annotations

import sys
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate

from tokenizers import Encoding, Tokenizer

from multimodal.byte_lru import ByteLRU

from .cuts import cuts_of
from .place_offsets import PlaceOffsets
from .places import TokenRange
from .stable_tokens import stable_tokens_of

# Shorter ones save too little for what an entry weighs and takes to find.
MIN_PIECE_CHARACTERS = 256
# About 400 chats of 8,192 tokens.
MAX_BYTES = 32 << 20
# Of these, for where tokens end.
_ENDS_SHARE = 1 / 8

_TOKEN_BYTES = 4

# tenant and piece → a number for each token
_Memory = ByteLRU[tuple[str, str], "array[int]"]


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
        for_ends = int(max_bytes * _ENDS_SHARE)
        self._remembered: _Memory = ByteLRU(max_bytes - for_ends)
        self._remembered_ends: _Memory = ByteLRU(for_ends)
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

        def number_of_tokens(offset: int, number_in: Callable[[Sequence[int], int], int]) -> int:
            piece = bisect_right(begins, offset) - 1
            before, inside = tokenized.begins[piece], offset - begins[piece]
            return before + (number_in(tokenized.ends[piece], inside) if inside else 0)

        ranges = []
        for start, shown, end in settled:
            first = number_of_tokens(shown, bisect_right)
            last = number_of_tokens(end, _number_up_to) if end > shown else first
            ranges.append(TokenRange(number_of_tokens(start, bisect_right), first, last))
        return Tokens(tokenized.ids, ranges)

    def _tokenize(
        self, text: SplitText, add_special_tokens: bool, check_number: Callable[[int], None], looked_at: Set[int]
    ) -> _Tokenized:
        """`looked_at`: the pieces of which it matters where their tokens end."""
        # encode() keeps the interpreter lock for its whole run (0.9 s for 1 MB); this one releases it.
        encode, encode_with_ends = self._tokenizer.encode_batch_fast, self._tokenizer.encode_batch
        prefix, suffix = (self._cuts.prefix, self._cuts.suffix) if self._cuts and add_special_tokens else ((), ())
        if self._cuts is None or (len(text.pieces) == 1 and not looked_at):
            encode = encode_with_ends if looked_at else encode
            (encoding,) = encode(text.pieces, add_special_tokens=add_special_tokens)
            check_number(len(encoding))
            self._count(len(encoding), 0)
            ends = {0: _ends(encoding)} if looked_at else {}
            return _Tokenized(encoding.ids, [len(prefix), len(encoding) - len(suffix)], ends)
        ends = {piece: known for piece in looked_at if (known := self._known_ends(text, piece)) is not None}
        with_ends = sorted(looked_at - ends.keys())
        without = [piece for piece, ids in enumerate(text.known) if ids is None and piece not in with_ends]
        encodings: dict[int, Encoding] = {}
        for pieces, encode_them in ((with_ends, encode_with_ends), (without, encode)):
            texts = [text.pieces[piece] for piece in pieces]
            encodings |= zip(pieces, encode_them(texts, add_special_tokens=False))
        numbers = [len(encodings[i]) if known is None else len(known) for i, known in enumerate(text.known)]
        begins = list(accumulate(numbers, initial=len(prefix)))
        check_number(begins[-1] + len(suffix))
        self._count(begins[-1] + len(suffix), sum(len(known) for known in text.known if known is not None))
        whole = array("I", prefix)
        for piece in with_ends:
            ends[piece] = _ends(encodings[piece])
            self._remember(self._remembered_ends, text, piece, ends[piece])
        for piece, known in enumerate(text.known):
            if known is not None:
                whole += known
                continue
            whole += (new := array("I", encodings[piece].ids))
            self._remember(self._remembered, text, piece, new)
        whole.extend(suffix)
        return _Tokenized(whole.tolist(), begins, ends)

    def _count(self, num_tokens: int, num_known: int) -> None:
        with self._lock:
            self.stats.num_tokens += num_tokens
            self.stats.num_remembered_tokens += num_known

    def _known_ends(self, text: SplitText, piece: int) -> array[int] | None:
        with self._lock:
            return self._remembered_ends.get((text.tenant, text.pieces[piece]))

    def _remember(self, memory: _Memory, text: SplitText, piece: int, numbers: array[int]) -> None:
        if piece == len(text.pieces) - 1:
            return
        key = (text.tenant, text.pieces[piece])
        with self._lock:
            memory.put(key, numbers, sum(map(sys.getsizeof, key)) + _TOKEN_BYTES * len(numbers))


@dataclass(frozen=True, slots=True)
class _Tokenized:
    """`begins`: how many tokens there are before each piece, and behind the last one. `ends`: where they end in it."""

    ids: list[int]
    begins: Sequence[int]
    ends: Mapping[int, Sequence[int]]


def _ends(encoding: Encoding) -> array[int]:
    """Where each token ends, in characters. What is put around a text has no place in it, and ends where others do."""
    return array("I", accumulate((end for _, end in encoding.offsets), max))


def _number_up_to(ends: Sequence[int], offset: int) -> int:
    """Of the tokens up to that with the character before `offset`. A character may be several, which end together."""
    last = bisect_left(ends, offset)
    return bisect_right(ends, ends[last]) if last < len(ends) else len(ends)
