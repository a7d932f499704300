"""A text is called too long by its size only if it is: no tokenizer makes fewer tokens of it than was said."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from frontend.prompt.least_tokens import NFC_SHRINKAGE, least_tokens_of

WORDS = [
    "a",
    "the ship ",
    "####" * 20,
    " " * 50,
    "\n\n",
    "<|end|>",
    "é",
    "e\u0301",
    "日本",
    "👨‍👩‍👧",
    "\x04",
    "12345",
    "▁",
    "▁▁",
]
TEXTS = st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=5)), max_size=40).map("".join)


def byte_level(alphabet: list[str] | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if alphabet is None else alphabet
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the ship the ships " + "#" * 64 + " " * 32] * 9, trainer)
    return tokenizer


def with_nfc() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC()])
    return tokenizer


def without_some_bytes() -> Tokenizer:
    return byte_level(["a", "e", "t"])


def sentencepiece_like() -> Tokenizer:
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "é", "▁a", "▁▁"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [("▁", "a"), ("▁", "▁")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


BOUNDED = [byte_level, with_nfc, without_some_bytes, sentencepiece_like]
MADE = {make: make() for make in BOUNDED}


@pytest.mark.parametrize("make", BOUNDED)
@given(text=TEXTS)
def test_no_text_has_fewer_tokens(make: Callable[[], Tokenizer], text: str) -> None:
    tokenizer = MADE[make]
    assert least_tokens_of(tokenizer)(text.encode()) <= len(tokenizer.encode(text))


@pytest.mark.parametrize("make", BOUNDED)
def test_long_texts_are_known_to_be_long(make: Callable[[], Tokenizer]) -> None:
    tokenizer = MADE[make]
    longest = max(len(token.encode()) for token in tokenizer.get_vocab())
    assert least_tokens_of(tokenizer)(b"a" * 1_000_000) >= 1_000_000 // (longest * NFC_SHRINKAGE)


def test_the_longest_token_makes_the_fewest_tokens() -> None:
    tokenizer = byte_level()
    longest = max(tokenizer.get_vocab(), key=len)
    text = longest.replace("Ġ", " ") * 100
    assert least_tokens_of(tokenizer)(text.encode()) >= len(tokenizer.encode(text)) - 1


def test_bytes_no_token_has_do_not_count() -> None:
    tokenizer = without_some_bytes()
    text = "Z" * 10_000
    assert len(tokenizer.encode(text)) == 0
    assert least_tokens_of(tokenizer)(text.encode()) == 0


def unigram(tokenizer: Tokenizer) -> None:
    tokenizer.model = models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)


def swallowing(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken("<|user|>", rstrip=True)])


def stripping(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Strip()


def collapsing(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Replace(Regex(" +"), " ")


def dropping(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(use_regex=False)]
    )


def without_alphabet(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()


@pytest.mark.parametrize("change", [unigram, swallowing, stripping, collapsing, dropping, without_alphabet])
def test_where_text_can_vanish_nothing_is_certain(change: Callable[[Tokenizer], None]) -> None:
    tokenizer = byte_level()
    change(tokenizer)
    assert least_tokens_of(tokenizer)(b"a" * 1_000_000) == 0


def test_nfc_shortens_no_text_by_more_than_was_assumed() -> None:
    """Of every character: the longest spelling that NFC turns into it, piece by piece of its decomposition."""
    longest: dict[str, int] = {}
    decomposed = {
        chr(i): unicodedata.normalize("NFD", chr(i)) for i in range(sys.maxunicode + 1) if not 0xD800 <= i < 0xE000
    }
    for character, parts in decomposed.items():
        if len(parts) == 1:
            longest[parts] = max(longest.get(parts, 0), len(character.encode()))
    for character, parts in decomposed.items():
        spelled_out = sum(longest[part] for part in parts)
        assert len(character.encode()) <= spelled_out
        composed = unicodedata.normalize("NFC", character)
        assert spelled_out <= NFC_SHRINKAGE * len(composed.encode())
