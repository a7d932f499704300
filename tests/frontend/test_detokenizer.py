"""Pieces of text, handed out as tokens come, must add up to the text of all tokens: for any tokens, cut anyhow."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from frontend.detokenizer import detokenizer_factory, token_bytes_of

GRAPHEMES = ["👨‍👩‍👧‍👦", "🇫🇷", "e\u0301", "नमस्ते", "你好，世界", "مرحبا", "\u200d", "a", " ", "\n", "\ufffd", "ﬁ", "𝒳"]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["你好，世界 the family 👨‍👩‍👧‍👦 went home नमस्ते"] * 9, trainer)
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens(["two words", "naïve"])
    return tokenizer


def byte_fallback(decoder: decoders.Decoder) -> Tokenizer:
    words = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "▁the", "the", "▁▁", "a", "b", "你", "é", "\ufffd", "</s>"]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def llama_decoder() -> decoders.Decoder:
    return decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )


def word_pieces() -> Tokenizer:
    words = ["[UNK]", "[SEP]", "the", "house", "##s", ",", ".", "n't", "##é", "do"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[SEP]"])
    return tokenizer


TOKENIZERS = {
    "byte_level": byte_level(),
    "byte_fallback": byte_fallback(llama_decoder()),
    "metaspace": byte_fallback(decoders.Metaspace()),
    "word_pieces": word_pieces(),
}


def pieces(tokenizer: Tokenizer, token_ids: list[int], cuts: list[int]) -> list[str]:
    detokenizer = detokenizer_factory(tokenizer)()
    texts = []
    start = 0
    for length in cuts:
        texts.append(detokenizer.push(token_ids[start : start + length]))
        start += length
    return [*texts, detokenizer.push(token_ids[start:]), detokenizer.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_pieces_add_up_for_any_tokens_even_ones_that_are_no_text(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    # A model's vocabulary may be larger than its tokenizer's.
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 3), max_size=24))
    cuts = data.draw(st.lists(st.integers(0, 4), max_size=24))
    assert "".join(pieces(tokenizer, ids, cuts)) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("name", "special"), [("byte_level", "<|end|>"), ("byte_fallback", "<s>"), ("word_pieces", "[SEP]")]
)
def test_special_tokens_that_are_to_be_spelled_out_are(name: str, special: str) -> None:
    tokenizer = TOKENIZERS[name]
    special_id, word_id = tokenizer.token_to_id(special), tokenizer.get_vocab_size() - 1
    detokenizer = detokenizer_factory(tokenizer, spelled_out=(special, "<absent>"))()
    ids = [word_id, special_id, word_id]
    text = "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush()
    assert special in text
    hidden = detokenizer_factory(tokenizer, spelled_out=("<absent>",))()
    assert special not in hidden.push(ids) + hidden.flush()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(GRAPHEMES), max_size=8).map("".join), st.integers(0, 60))
def test_pieces_of_real_text_are_the_text_wherever_it_ends(text: str, length: int) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode(text).ids
    assert "".join(pieces(tokenizer, ids, [1] * len(ids))) == text
    cut = ids[:length]
    assert "".join(pieces(tokenizer, cut, [1] * len(cut))) == tokenizer.decode(cut)


def test_a_character_is_held_back_until_it_is_whole_and_not_longer() -> None:
    tokenizer = byte_level()
    one_byte_each = [tokenizer.token_to_id(pre_token) for pre_token in "ðŁĻĤ"]  # 🙂
    assert pieces(tokenizer, [*one_byte_each, tokenizer.token_to_id("a")], [1] * 4) == ["", "", "", "🙂", "a", ""]


def test_special_tokens_have_no_text() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    special = tokenizer.token_to_id("<|end|>")
    assert "".join(pieces(tokenizer, [special, *tokenizer.encode("hi").ids, special], [1])) == "hi"


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_the_bytes_of_tokens_add_up_to_the_text(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    words = GRAPHEMES if name == "byte_level" else ["the", " the", "  ", "a", "b", "你", "é", "ж", "🙂"]
    text = data.draw(st.lists(st.sampled_from(words), max_size=8).map("".join))
    ids = tokenizer.encode(text.replace(" ", "▁") if name == "byte_fallback" else text).ids
    token_bytes = token_bytes_of(tokenizer)
    assert b"".join(map(token_bytes, ids)) == text.encode()


@pytest.mark.parametrize(
    ("name", "token", "value"),
    [
        ("byte_level", "ðŁ", b"\xf0\x9f"),
        ("byte_level", "Ġhome", b" home"),
        ("byte_level", "<|end|>", b"<|end|>"),
        ("byte_level", "two words", b"two words"),
        ("byte_fallback", "<0xF0>", b"\xf0"),
        ("byte_fallback", "▁the", b" the"),
        ("byte_fallback", "</s>", b"</s>"),
        ("metaspace", "▁the", b" the"),
        ("word_pieces", "##s", b"s"),
        ("word_pieces", "house", b" house"),
        ("word_pieces", ",", b","),
    ],
)
def test_a_token_by_itself(name: str, token: str, value: bytes) -> None:
    tokenizer = TOKENIZERS[name]
    assert token_bytes_of(tokenizer)(tokenizer.token_to_id(token)) == value


@pytest.mark.parametrize("name", TOKENIZERS)
def test_an_id_outside_the_vocabulary_stands_for_nothing(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    assert token_bytes_of(tokenizer)(tokenizer.get_vocab_size() + 3) == b""
