"""Token ids → text, piece by piece, so that the pieces always add up to the text of the whole.

A token need not end where a character ends, and what a token decodes to may depend on its neighbours. A
`Detokenizer` hands out text as soon as nothing that follows can change it, and guarantees, for every sequence of
ids and every way of cutting it into pushes: the concatenated pieces, `flush()` included, equal
`tokenizer.decode(all ids, skip_special_tokens=True)`, but for special tokens that are to be spelled out. Work is linear
in the number of tokens.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Protocol

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """The text of one sequence of tokens. Special tokens and ids outside the vocabulary have none."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that has become certain (possibly empty)."""
        ...

    def flush(self) -> str:
        """The sequence has ended: return what was held back, an unfinished character as U+FFFD."""
        ...


def detokenizer_factory(tokenizer: Tokenizer, *, spelled_out: Collection[str] = ()) -> Callable[[], Detokenizer]:
    """Return what makes a fresh detokenizer per sequence; what they can share is prepared here once.

    `spelled_out` are special tokens that are part of the text nevertheless, if the tokenizer has them.
    """
    special_ids = frozenset(
        i
        for i, token in tokenizer.get_added_tokens_decoder().items()
        if token.special and token.content not in spelled_out
    )
    kinds = _decoder_kinds(tokenizer)
    if kinds == ["ByteLevel"]:
        token_bytes = _TokenBytes(tokenizer, special_ids)
        return lambda: ByteLevelDetokenizer(token_bytes)
    byte_tokens = frozenset(_byte_fallback_bytes(tokenizer)) if "ByteFallback" in kinds else frozenset()
    return lambda: WindowDetokenizer(tokenizer, special_ids, byte_tokens)


def token_bytes_of(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """Return a function: a token's id → what it stands for by itself, in UTF-8.

    That may be part of a character. Special tokens are spelled as they are written; ids outside the vocabulary stand
    for nothing. A leading space that a decoder strips from the beginning of a text is the token's own.
    """
    kinds = _decoder_kinds(tokenizer)
    if kinds == ["ByteLevel"]:
        return _TokenBytes(tokenizer, frozenset()).__getitem__
    byte_tokens = _byte_fallback_bytes(tokenizer) if "ByteFallback" in kinds else {}
    # What a token looks like behind another one, whatever that is.
    context = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
    before = tokenizer.decode(context, skip_special_tokens=False)

    @cache
    def token_bytes(token_id: int) -> bytes:
        if (value := byte_tokens.get(token_id)) is not None:
            return value
        if tokenizer.id_to_token(token_id) is None:
            return b""
        return tokenizer.decode([*context, token_id], skip_special_tokens=False)[len(before) :].encode()

    return token_bytes


class ByteLevelDetokenizer:
    """For byte-level BPE, where a token is simply a string of bytes: each goes through a UTF-8 decoder once."""

    def __init__(self, token_bytes: _TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join([self._token_bytes[i] for i in token_ids]))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For every other decoder: decode the new tokens together with those before them, and take the difference.

    The tokens of the previous piece give the context (word separators, a stripped first space). Held back are
    runs of byte-fallback tokens, which decode as a whole or not at all, and text that ends in U+FFFD, which may
    yet become a character.
    """

    def __init__(self, tokenizer: Tokenizer, special_ids: frozenset[int], byte_tokens: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._byte_tokens = byte_tokens
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        self._pending += [
            i for i in token_ids if i not in self._special_ids and self._tokenizer.id_to_token(i) is not None
        ]
        if not self._pending or self._pending[-1] in self._byte_tokens:
            return ""
        return self._take(final=False)

    def flush(self) -> str:
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        decode = self._tokenizer.decode
        text = decode(self._context + self._pending, skip_special_tokens=False)
        if text.endswith(_REPLACEMENT) and not final:
            return ""
        before = decode(self._context, skip_special_tokens=False)
        self._context, self._pending = self._pending or self._context, []
        return text[len(before) :]


class _TokenBytes(dict[int, bytes]):
    """Token id → the bytes it stands for, filled as ids are met."""

    def __init__(self, tokenizer: Tokenizer, special_ids: frozenset[int]) -> None:
        super().__init__(dict.fromkeys(special_ids, b""))
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id) or ""
        try:
            value = bytes([BYTE_OF_CHARACTER[character] for character in token])
        except KeyError:  # an added token, spelled as itself
            value = token.encode()
        self[token_id] = value
        return value


def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level BPE (GPT-2): printable bytes stand for themselves, the others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()


def _decoder_kinds(tokenizer: Tokenizer) -> list[str]:
    if tokenizer.decoder is None:
        return []
    state = json.loads(tokenizer.decoder.__getstate__())
    return [part["type"] for part in state.get("decoders", [state])]


def _byte_fallback_bytes(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Of each byte-fallback token."""
    ids = ((tokenizer.token_to_id(f"<0x{byte:02X}>"), bytes([byte])) for byte in range(256))
    return {token_id: value for token_id, value in ids if token_id is not None}
