"""How far the tokens of a text are sure, whatever goes on behind it.

A token may look at what comes after it: `ship` is one token and `ships` another, `.` and a line break may be one. So of
a text of which only the beginning is settled, some of the last tokens are not. They are up to two kinds of places:

- the end of an added token that is found wherever it is written (`cuts`);
- before a space that follows a character after which no token of the vocabulary has one. No token goes over such a
  place, so BPE and Unigram find left of it what they would find without what is right of it. WordPiece and WordLevel do
  where words end at spaces, which is tried.

That holds for steps whose rules are known. Of the texts of a tokenizer with others nothing is sure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from frontend.detokenizer import BYTE_OF_CHARACTER

from .cuts import Cuts, is_known
from .tokenizer_steps import is_byte_level, steps

# What they make of a character does not depend on it, or is a space.
_PLAIN_NORMALIZERS = frozenset({"Prepend", "Replace"})
_PATTERNS_OF_SPACES = frozenset({" {2,}", "\\s+", " +"})
_OVER_A_SPACE = re.compile(r"(\S) ")
_LEFT = ("a", "the ship", "x.", "12", "é", "日本", "(a)", "<", "👩\u200d🚀")
_RIGHT = ("a", " a", "\n", " ", ".", "1", "日", "'s", "\u0301")


@dataclass(frozen=True, slots=True)
class StableTokens:
    """What is sure of the texts of one tokenizer.

    `goes_on`: the characters after which a token may go on with a space; None if nothing is known of spaces.
    """

    cuts: Cuts | None
    goes_on: frozenset[str] | None

    def end(self, text: str, settled: int) -> int:
        """A place in `text`, at most `settled`. The tokens before it depend on nothing from `settled` on."""
        end = 0 if self.cuts is None else self.cuts.last_end(text, settled)
        if self.goes_on is None:
            return end
        while (space := text.rfind(" ", end, settled)) > 0:
            if not text[space - 1].isspace() and text[space - 1] not in self.goes_on:
                return space
            settled = space
        return end


def stable_tokens_of(tokenizer: Tokenizer, cuts: Cuts | None) -> StableTokens:
    """`cuts` are those of `tokenizer`. Reads the whole vocabulary: 0.25 s for 260,000 tokens."""
    if not is_known(tokenizer) or not all(map(_keeps_spaces, steps(tokenizer.normalizer, "normalizers"))):
        return StableTokens(cuts, None)
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    goes_on = {found[1] for spelled in (*added, *_with_spaces(tokenizer)) for found in _OVER_A_SPACE.finditer(spelled)}
    # A normalizer that makes one character of another makes it unknown which those of a text are.
    if goes_on and any(step["type"] not in _PLAIN_NORMALIZERS for step in steps(tokenizer.normalizer, "normalizers")):
        return StableTokens(cuts, None)
    return StableTokens(cuts, frozenset(goes_on) if _proves_right(tokenizer, goes_on) else None)


def _keeps_spaces(normalizer: dict[str, Any]) -> bool:
    """Whether it makes the same of what is left of a space, whatever is right of it, as far as is known."""
    if normalizer["type"] != "Replace":
        return True
    pattern = normalizer["pattern"]
    return pattern.get("Regex") in _PATTERNS_OF_SPACES or not _OVER_A_SPACE.search(pattern.get("String", "x "))


def _with_spaces(tokenizer: Tokenizer) -> Iterator[str]:
    """The tokens of the vocabulary that have a space, but for the first character."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    if not is_byte_level(tokenizer):
        yield from (token.replace("▁", " ") for token in vocabulary if "▁" in token[1:] or " " in token[1:])
        return
    space = next(character for character, byte in BYTE_OF_CHARACTER.items() if byte == ord(" "))
    for token in vocabulary:
        if space in token[1:]:
            yield bytes(BYTE_OF_CHARACTER.get(character, ord("?")) for character in token).decode(errors="replace")


def _proves_right(tokenizer: Tokenizer, goes_on: Set[str]) -> bool:
    def token_ids(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    try:
        for left in _LEFT:
            alone = token_ids(left)
            if left[-1] not in goes_on and any(token_ids(f"{left} {right}")[: len(alone)] != alone for right in _RIGHT):
                return False
    except Exception:  # as tokenizers raises it, for instance where a text needs an unknown token that is not there
        return False
    return True
