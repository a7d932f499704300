"""Texts are tokenized in pieces, and pieces that came before are not tokenized again: a chat costs what is new in it.

Exact by construction: see `cuts`. Nothing that one tenant sent is used for another.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from multimodal.byte_lru import ByteLRU

from .cuts import cuts_of

# Shorter ones save too little for what an entry weighs and takes to find.
MIN_PIECE_CHARACTERS = 256
# About 400 chats of 8,192 tokens.
MAX_BYTES = 32 << 20

_TOKEN_BYTES = 4


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


class PiecewiseTokenizer:
    """Gives the tokens that `tokenizer` gives. From any thread.

    At most `max_bytes` are remembered, of all tenants together; the least recently used make room. A text's last piece
    is not: it is what grows.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_bytes: int = MAX_BYTES) -> None:
        self.stats = TokenizationStats()
        self._tokenizer = tokenizer
        self._cuts = cuts_of(tokenizer)
        self._remembered: ByteLRU[tuple[str, str], array[int]] = ByteLRU(max_bytes)
        self._lock = threading.Lock()

    def split(self, text: str, tenant: str) -> SplitText:
        """Find what is known of `text`: about 1 ms for a million characters."""
        if self._cuts is None:
            return SplitText(tenant, [text], [None])
        pieces = list(self._cuts.pieces(text, MIN_PIECE_CHARACTERS))
        with self._lock:
            known = [self._remembered.get((tenant, piece)) for piece in pieces[:-1]]
        return SplitText(tenant, pieces, [*known, None])

    def token_ids(self, text: SplitText, *, add_special_tokens: bool, check_number: Callable[[int], None]) -> list[int]:
        """Tokenize what is not known; `add_special_tokens` adds what the tokenizer puts around a bare text (BOS).

        Special tokens spelled out in the text become special tokens. `check_number` is told how many tokens there are;
        what it raises ends this, and nothing is remembered. The interpreter lock is released for most of it, but for
        listing them (20 ms for a million).
        """
        # encode() keeps the interpreter lock for its whole run (0.9 s for 1 MB); this one releases it.
        encode = self._tokenizer.encode_batch_fast
        if len(text.pieces) == 1:
            (encoding,) = encode(text.pieces, add_special_tokens=add_special_tokens)
            check_number(len(encoding))
            self._count(len(encoding), 0)
            ids: list[int] = encoding.ids
            return ids
        assert self._cuts is not None
        prefix, suffix = (self._cuts.prefix, self._cuts.suffix) if add_special_tokens else ((), ())
        unknown = [place for place, token_ids in enumerate(text.known) if token_ids is None]
        encodings = dict(zip(unknown, encode([text.pieces[place] for place in unknown], add_special_tokens=False)))
        num_known = sum(len(token_ids) for token_ids in text.known if token_ids is not None)
        num_tokens = len(prefix) + num_known + sum(map(len, encodings.values())) + len(suffix)
        check_number(num_tokens)
        self._count(num_tokens, num_known)
        whole = array("I", prefix)
        for place, token_ids in enumerate(text.known):
            if token_ids is not None:
                whole += token_ids
                continue
            whole += (new := array("I", encodings[place].ids))
            if place < len(text.pieces) - 1:
                self._remember(text.tenant, text.pieces[place], new)
        whole.extend(suffix)
        return whole.tolist()

    def _count(self, num_tokens: int, num_known: int) -> None:
        with self._lock:
            self.stats.num_tokens += num_tokens
            self.stats.num_remembered_tokens += num_known

    def _remember(self, tenant: str, piece: str, token_ids: array[int]) -> None:
        weight = sys.getsizeof(piece) + sys.getsizeof(tenant) + _TOKEN_BYTES * len(token_ids)
        with self._lock:
            self._remembered.put((tenant, piece), token_ids, weight)
