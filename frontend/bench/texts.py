"""Texts that are the same for the same seed, and of a given size in tokens."""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer

# Everyday words: one token, seldom two, in the vocabularies of today's models.
VOCABULARY = (
    "account action afternoon agree air animal answer apple arm arrive ask autumn baby bag ball bank basket beach "
    "bear bed begin bell bench bird blue boat body book bottle box boy bread break bridge bring brother brown build "
    "burn bus butter button buy cake call camera car card carry cat chair change child choose church circle city "
    "clean clear climb clock cloud coat coffee cold color come cook corner count country cover cow cross cup cut "
    "dance dark day deep desk dinner dog door draw dream dress drink drive dry duck ear early earth east easy eat "
    "egg empty enter evening eye face fall family far farm fast father feel field fill find finger fire fish floor "
    "flower fly follow food foot forest forget friend fruit game garden gate gift girl give glass go gold grass "
    "green ground grow guess hair hand happy hat hear heart heavy help hill hold home horse hot hour house ice idea "
    "iron island jump keep key kind king kitchen knife know lake lamp land large late laugh leaf learn leave left "
    "leg letter light line list listen live long look lose love lunch machine make map mark market meat meet milk "
    "minute mirror money month moon morning mother mountain mouth move music name near neck need new night north "
    "nose number ocean old open orange order paint paper park party pass pay pen people picture place plan plant "
    "play pocket point pool poor press pull push queen question quick quiet rain read red rest rice rich ride right "
    "ring river road rock roof room round run salt sand save school sea season seat see sell send shape share sheep "
    "ship shirt shoe shop short show side silver sing sister sit sky sleep slow small smile snow soft song sound "
    "soup south speak spoon spring square stand star start station stay step stone stop store storm story street "
    "strong sugar summer sun sweet swim table take talk tall taste teach tell thank thin think ticket time today "
    "tomorrow touch town train travel tree turn uncle under valley village visit voice wait walk wall want warm "
    "wash watch water way wear week west wet wheel white wide wind window winter wish woman wonder wood word work "
    "world write year yellow yesterday young"
).split()

# Of usual English text; what is used where the server tells no token counts.
USUAL_TOKENS_PER_WORD = 1.2


class TextMaker:
    """Makes texts from `seed`. Sizes are kept by counting with `tokenizer`, else by `tokens_per_word`."""

    def __init__(
        self,
        seed: int,
        *,
        tokenizer: Tokenizer | None = None,
        tokens_per_word: float = USUAL_TOKENS_PER_WORD,
    ) -> None:
        self.seed = seed
        self._tokenizer = tokenizer
        self._tokens_per_word = tokens_per_word

    def words(self, name: str, num_words: int) -> str:
        """Sentences of `num_words` words in all. Texts of different names differ from their first words on."""
        rng = random.Random(f"{self.seed}/{name}")
        sentences: list[str] = []
        while num_words > 0:
            length = min(num_words, rng.randrange(6, 15))
            sentences.append(" ".join(rng.choices(VOCABULARY, k=length)).capitalize() + ".")
            num_words -= length
        return " ".join(sentences)

    def text(self, name: str, num_tokens: int) -> str:
        """About `num_tokens` tokens; with a tokenizer, at most that many and short of it by a word at most."""
        if self._tokenizer is None:
            return self.words(name, max(1, round(num_tokens / self._tokens_per_word)))
        # A word and the blank or stop beside it are one token at least.
        text = self.words(name, num_tokens + 1)
        ends = [end for _, end in self._tokenizer.encode(text, add_special_tokens=False).offsets]
        if len(ends) <= num_tokens:
            return text
        # Not within a word: cut in two, it may be tokenized in another way.
        cut = text.rfind(" ", 0, ends[num_tokens - 1] + 1)
        return text[: max(cut, 1)]


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a model's directory, or in a `tokenizer.json` itself. Raises ValueError."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # The library raises nothing more special.
        raise ValueError(f"cannot read a tokenizer from {file}: {error}") from error
