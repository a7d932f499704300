"""Where a text can be cut so that the tokens of the pieces, one after the other, are the tokens of the text.

A tokenizer first looks for its added tokens, from left to right, always the longest. What lies between them goes
through normalizer, pre-tokenizer and model by itself. So a text may be cut *before* an added token that is sure to be
found there whatever stands around it, if nothing on its left can tell whether it is there:

- it is looked for in the text as it is (not `normalized`), and stands for itself whatever its neighbours (no
  `single_word`);
- no other such token can claim a part of it: none ends as it begins, contains it, or begins with it and goes on;
- it takes nothing of what stands before it (no `lstrip`), and begins with punctuation: tokens before it that take
  whitespace (`rstrip`) or must end a word (`single_word`) find there what they would find at the end of a text.

The piece behind a cut begins with that token. So what is special at the beginning of a text (Metaspace's `first`) does
not happen there, as it would not have in the whole. What is put around a whole text (BOS, EOS) is told apart.

That holds for the steps named here, whose rules are known. A tokenizer with others is not cut; nor is one that gives
other tokens when it is tried.
"""

from __future__ import annotations

import logging
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from tokenizers import AddedToken, Tokenizer, models

from .tokenizer_steps import steps

logger = logging.getLogger(__name__)

_NORMALIZERS = frozenset(
    "BertNormalizer ByteLevel Lowercase NFC NFD NFKC NFKD Nmt Precompiled Prepend Replace Strip StripAccents".split()
)
_PRE_TOKENIZERS = frozenset(
    "BertPreTokenizer ByteLevel CharDelimiterSplit Digits FixedLength Metaspace Punctuation Split UnicodeScripts"
    " Whitespace WhitespaceSplit".split()
)
_POST_PROCESSORS = frozenset("BertProcessing ByteLevel RobertaProcessing TemplateProcessing".split())
# No part of a word, and no whitespace, to whomever asks.
_FIRST_CHARACTERS = frozenset(string.punctuation) - {"_"}
_LOOK_BACK_CHARACTERS = 256
_PROBES = (" a", "\n\n b ", "É é 日本 👩‍🚀", " \u00a0", "x")


@dataclass(frozen=True, slots=True)
class Cuts:
    """Where the texts of one tokenizer can be cut, and what it puts around a whole text."""

    _before: re.Pattern[str]
    prefix: list[int]
    suffix: list[int]

    def pieces(self, text: str, min_characters: int) -> Iterator[str]:
        """`text` in pieces, all but the last of at least `min_characters`, which is at least 1.

        Where a text goes on, all its pieces but the last stay as they are.
        """
        start = 0
        while (found := self._before.search(text, start + min_characters)) is not None:
            yield text[start : found.start()]
            start = found.start()
        yield text[start:]

    def last_end(self, text: str, end: int) -> int:
        """Where the last of the tokens ends before which a text is cut, of those in `text[:end]`; 0 without one.

        Whatever goes on behind it, the tokens up to there stay as they are.
        """
        size = _LOOK_BACK_CHARACTERS
        while True:
            start = max(0, end - size)
            last = max((found.end() for found in self._before.finditer(text, start, end)), default=0)
            if last or not start:
                return last
            size *= 4


def cuts_of(tokenizer: Tokenizer) -> Cuts | None:
    """None if its texts cannot be cut, as far as is known."""
    added = [token for token in tokenizer.get_added_tokens_decoder().values() if not token.normalized]
    tokens = sorted(token.content for token in _unmistakable(added))
    if not tokens or not is_known(tokenizer):
        return None
    try:
        affixes = _affixes(tokenizer)
        cuts = None if affixes is None else Cuts(re.compile(_pattern(tokens)), *affixes)
        reason = "other tokens" if cuts is None or not _proves_right(tokenizer, cuts, tokens) else None
    except (
        Exception
    ) as error:  # as tokenizers raises it, for instance where a text needs an unknown token that is not there
        reason = str(error)
    if reason is not None:
        logger.warning("tokenizer_not_cut reason=%r", reason)
        return None
    return cuts


def _unmistakable(added: list[AddedToken]) -> Iterator[AddedToken]:
    """Those of `added` that are found wherever they are written, and before which a text may be cut."""
    contents = [token.content for token in added]
    beginnings = {content[:end] for content in contents for end in range(1, len(content))}
    endings = {content[start:] for content in contents for start in range(1, len(content))}
    behind_first = "\n".join(content[1:] for content in contents)
    for token in added:
        content = token.content
        if token.lstrip or token.single_word or content[0] not in _FIRST_CHARACTERS:
            continue
        if content in beginnings or content in behind_first:
            continue
        if not any(content[:end] in endings for end in range(1, len(content) + 1)):
            yield token


def is_known(tokenizer: Tokenizer) -> bool:
    """Whether the steps of `tokenizer` are those named here, and it does twice the same."""
    model = tokenizer.model
    known = (
        (tokenizer.normalizer, "normalizers", _NORMALIZERS),
        (tokenizer.pre_tokenizer, "pretokenizers", _PRE_TOKENIZERS),
        (tokenizer.post_processor, "processors", _POST_PROCESSORS),
    )
    return (
        isinstance(model, models.BPE | models.Unigram | models.WordLevel | models.WordPiece)
        # Some choose among the ways to spell a word by chance.
        and not any(getattr(model, name, None) for name in ("dropout", "alpha", "nbest_size"))
        and not tokenizer.encode_special_tokens
        and tokenizer.truncation is None
        and tokenizer.padding is None
        and all(step["type"] in names for component, key, names in known for step in steps(component, key))
    )


def _affixes(tokenizer: Tokenizer) -> tuple[list[int], list[int]] | None:
    """What the tokenizer puts before and behind a text; None if that is not all it does."""
    affixes: list[int] = tokenizer.encode("", add_special_tokens=True).ids
    bare = tokenizer.encode(_PROBES[0], add_special_tokens=False).ids
    whole = tokenizer.encode(_PROBES[0], add_special_tokens=True).ids
    for place in range(len(affixes) + 1):
        prefix, suffix = affixes[:place], affixes[place:]
        if bare and whole == [*prefix, *bare, *suffix]:
            return prefix, suffix
    return None


def _proves_right(tokenizer: Tokenizer, cuts: Cuts, tokens: list[str]) -> bool:
    """Tries every one of `tokens`, and some next to each other."""
    texts = [probe + "".join(token + probe for token in tokens) for probe in ("", *_PROBES)]
    texts += [f"{left}{between}{right}" for left in tokens[:3] for right in tokens[:3] for between in ("", *_PROBES)]
    for text in texts:
        pieces = list(cuts.pieces(text, 1))
        of_pieces = [i for piece in pieces for i in tokenizer.encode(piece, add_special_tokens=False).ids]
        whole = tokenizer.encode(text, add_special_tokens=True).ids
        if whole != [*cuts.prefix, *of_pieces, *cuts.suffix]:
            return False
    return True


def _pattern(words: list[str]) -> str:
    """A regular expression for `words`, sorted, none of which begins with another.

    Its branches part at the first character that tells them apart, so that no text makes it slow.
    """
    if len(words) == 1:
        return re.escape(words[0])
    common = next(i for i, (first, last) in enumerate(zip(words[0], words[-1])) if first != last)
    branches = groupby((word[common:] for word in words), key=lambda word: word[0])
    return re.escape(words[0][:common]) + "(?:" + "|".join(_pattern(list(branch)) for _, branch in branches) + ")"
