"""`bad_words`: texts → the sequences of tokens that may not be completed."""

from __future__ import annotations

from collections.abc import Sequence

from frontend.errors import invalid_request
from frontend.prompt.tokenizer import ModelTokenizer

# About 10 ms of tokenizing.
MAX_CHARACTERS = 32_768


def bad_words_token_ids(words: Sequence[str], tokenizer: ModelTokenizer) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word, as it is at the beginning of a text and as it is after a space.

    Raises ApiError (400) for an empty word, and for too many characters.
    """
    for i, word in enumerate(words):
        if not word.strip():
            raise invalid_request(f"bad_words[{i}] must hold more than whitespace", f"bad_words[{i}]")
    num_characters = sum(map(len, words))
    if num_characters > MAX_CHARACTERS:
        raise invalid_request(
            f"bad_words have {num_characters} characters; at most {MAX_CHARACTERS} are allowed", "bad_words"
        )
    texts = [text for word in words for text in (word.lstrip(), " " + word.lstrip())]
    encodings = tokenizer.backend.encode_batch_fast(texts, add_special_tokens=False)
    return tuple(dict.fromkeys(tuple(encoding.ids) for encoding in encodings if encoding.ids))
