"""How many tokens a text has at least, from its length alone: a reason to refuse it without tokenizing it."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import Tokenizer, models

from frontend.detokenizer import BYTE_OF_CHARACTER

from .tokenizer_steps import is_byte_level, steps

# No text is more than this many times as long as its NFC form, in UTF-8 bytes (the test tries all of Unicode).
NFC_SHRINKAGE = 4

# Each passes on every byte of the text, if its `behavior` is not to remove what it splits at.
_KEEPING_PRE_TOKENIZERS = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"})


def least_tokens_of(tokenizer: Tokenizer) -> Callable[[bytes], int]:
    """Returns a function: a text's UTF-8 → a number of tokens that it is certain to have at least. It costs nothing.

    No token stands for more bytes than the longest one has. That says something of BPE over bytes, where unknown
    characters cannot disappear in one token, behind steps that shorten the text by no more than a known factor. Of
    other tokenizers, and of those with added tokens that swallow the whitespace around them, nothing is certain: 0.
    """
    longest_bytes, dropped_bytes = _longest_token_bytes(tokenizer), _dropped_bytes(tokenizer)
    shrinkage = _shrinkage(tokenizer)
    if longest_bytes is None or dropped_bytes is None or shrinkage is None or (dropped_bytes and tokenizer.normalizer):
        return lambda _: 0
    return lambda text: -(-len(text.translate(None, dropped_bytes)) // (longest_bytes * shrinkage))


def _longest_token_bytes(tokenizer: Tokenizer) -> int | None:
    """Bytes of the normalized text; None if there is no longest token."""
    added = tokenizer.get_added_tokens_decoder().values()
    if not isinstance(tokenizer.model, models.BPE) or any(token.lstrip or token.rstrip for token in added):
        return None
    # A byte-level token is spelled with one character per byte; other spellings are longer than the text, not shorter.
    size = len if is_byte_level(tokenizer) else _utf8_bytes
    sizes = [size(token) for token in tokenizer.get_vocab(with_added_tokens=False)]
    return max([1, *sizes, *(_utf8_bytes(token.content) for token in added)])


def _dropped_bytes(tokenizer: Tokenizer) -> bytes | None:
    """Bytes that need not appear in any token, because the vocabulary lacks them; None if these are not just bytes."""
    splits = steps(tokenizer.pre_tokenizer, "pretokenizers")
    if any(split["type"] not in _KEEPING_PRE_TOKENIZERS or split.get("behavior") == "Removed" for split in splits):
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    if is_byte_level(tokenizer):
        return bytes(byte for character, byte in BYTE_OF_CHARACTER.items() if character not in vocabulary)
    falls_back = tokenizer.model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    return b"" if falls_back else None


def _shrinkage(tokenizer: Tokenizer) -> int | None:
    """At most how many times shorter the normalizer makes a text; None if that is not known."""
    shrinkage = 1
    for step in steps(tokenizer.normalizer, "normalizers"):
        if step["type"] == "NFC":
            shrinkage *= NFC_SHRINKAGE
        elif step["type"] == "Replace":
            replaced = step["pattern"].get("String")
            if replaced is None or _utf8_bytes(step["content"]) < _utf8_bytes(replaced):
                return None
        elif step["type"] != "Prepend":
            return None
    return shrinkage


def _utf8_bytes(text: str) -> int:
    return len(text.encode())
