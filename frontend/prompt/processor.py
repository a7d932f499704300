"""Prompts are rendered and tokenized in threads, so that a long one stalls neither the event loop nor short ones.

A long one is one that has much to tokenize: a chat that goes on is short if its last turn is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple, TypeVar

from .chat import Chat
from .errors import ChatTemplateError, PromptError, PromptTooLongError
from .least_tokens import least_tokens_of
from .pictures import ChatPictures, before_what_it_decides
from .piecewise import PiecewiseTokenizer, SplitText, TokenizationStats, Tokens
from .place_offsets import PlaceOffsets, place_offsets
from .places import Bounds, Place
from .prompt import Prompt
from .spellings import refuse_spellings
from .tokenizer import ModelTokenizer

T = TypeVar("T")

# What takes longer than about 10 ms waits in its own line.
LONG_PROMPT_CHARACTERS = 32_768
# Up to here tokens are counted, though it may be certain that they are too many. This takes about 2 s and 300 MB.
ALWAYS_COUNTED_BYTES = 2 << 20

_CHARACTERS_PER_TOKEN = 4
# What else takes time, in characters to be tokenized: of each character rendering, splitting and listing; each message.
_PREPARING_SHARE = 1 / 8
_MESSAGE_CHARACTERS = 8
_RENDERINGS_PER_PLACE = 4
# Done at once: waking a thread takes as long. With it go up to 1,024 characters to be tokenized, 0.3 ms.
_AT_ONCE_COST = 128


class PlacedText(NamedTuple):
    """A text, and where places of a chat are in it."""

    text: str
    places: Sequence[PlaceOffsets]


class PromptProcessor:
    """Turns chats and texts into token ids. Use from one event loop; `close()` it at the end.

    Long prompts share one thread, short ones have `num_threads` others, the shortest are done at once: the wait of a
    short one does not depend on how many long ones are being tokenized. A prompt whose caller is cancelled before its
    turn is dropped. What a `tenant` sent is used only for the same tenant; it is the request's `cache_salt`, empty
    without one.

    Attributes:
        pictures: None for models that take none. Not closed here.
    """

    def __init__(
        self, tokenizer: ModelTokenizer, pictures: ChatPictures | None = None, *, num_threads: int = 2
    ) -> None:
        self.tokenizer = tokenizer
        self.pictures = pictures
        self._piecewise = PiecewiseTokenizer(tokenizer.backend)
        self._least_tokens = least_tokens_of(tokenizer.backend)
        self._short = ThreadPoolExecutor(num_threads, thread_name_prefix="prompt")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long_prompt")

    @property
    def tokenization(self) -> TokenizationStats:
        """How much was tokenized, and how much remembered."""
        return self._piecewise.stats

    def close(self) -> None:
        """Drop what has not begun. A tokenization that runs cannot be interrupted; it is not waited for."""
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)

    async def chat(
        self,
        chat: Chat,
        *,
        max_model_len: int | None,
        tenant: str = "",
        add_special_tokens: bool = False,
        check_length: bool = True,
        places: Sequence[Place] = (),
        bounds: Bounds = "all",
    ) -> Prompt:
        """The chat as a prompt. By default the template alone decides about BOS.

        `bounds` of `places`, which are of `places_of(chat)`, are found in it. That takes some renderings of each.

        Raises:
            ChatTemplateError: the model has no chat template, or the template refuses this chat.
            PromptError: see `ChatTemplate.render`, `text`, `ChatPictures.sources`, `load`, `expand` and `prompt`; or a
                text spells what stands for a picture.
            PromptTooLongError: see `text`.
        """
        template = self.tokenizer.chat_template
        if template is None:
            raise ChatTemplateError("this model has no chat template; use /v1/completions")
        pictures = self.pictures

        def render() -> PlacedText:
            if pictures is not None:
                refuse_spellings(chat, pictures.spellings)
            text = template.render(chat)
            return PlacedText(text, place_offsets(template, chat, text, places, bounds))

        def tokenize(make_text: Callable[[], PlacedText], cost: float) -> Awaitable[Tokens]:
            return self._tokenize(make_text, cost, max_model_len, tenant, add_special_tokens, check_length)

        cost = _PREPARING_SHARE * chat.num_characters() + _MESSAGE_CHARACTERS * len(chat.messages)
        cost *= 1 + _RENDERINGS_PER_PLACE * len(places)
        sources = [] if pictures is None else pictures.sources(chat)
        if pictures is None or not sources:
            tokens = await tokenize(render, cost)
            return Prompt(tokens.ids, places=dict(zip(places, tokens.ranges, strict=True)))
        # What is wrong with the chat is found before anything is fetched.
        text, offsets = await self._run(render, cost)
        loaded = await pictures.load(sources, tenant)

        def expand() -> PlacedText:
            return PlacedText(pictures.expand(text, loaded), pictures.expanded(text, offsets, loaded))

        num_characters = len(text) + sum(len(picture.layout.replacement) for picture in loaded)
        cost = _PREPARING_SHARE * num_characters
        tokens = await tokenize(expand, cost)
        prompt = await self._run(lambda: pictures.prompt(tokens.ids, loaded), cost)
        ranges = [
            range_._replace(start=before_what_it_decides(range_.start, prompt.extra_key_spans))
            for range_ in tokens.ranges
        ]
        return replace(prompt, places=dict(zip(places, ranges, strict=True)))

    async def text(
        self,
        text: str,
        *,
        max_model_len: int | None,
        tenant: str = "",
        add_special_tokens: bool = True,
        check_length: bool = True,
    ) -> list[int]:
        """Token ids of a bare text, by default with BOS if the tokenizer adds one.

        `max_model_len` is None while no engine has told it.

        Raises:
            PromptTooLongError: fewer than one token would be left for the answer. Without `check_length` only a text
                that is very long, too, is refused.
            PromptError: the text is very long, and `max_model_len` is None.
        """
        cost = _PREPARING_SHARE * len(text)
        placed = PlacedText(text, ())
        tokens = await self._tokenize(lambda: placed, cost, max_model_len, tenant, add_special_tokens, check_length)
        return tokens.ids

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens spelled out. Ids that stand for no token have no text."""
        return await self._run(lambda: self.tokenizer.decode(token_ids), len(token_ids) * _CHARACTERS_PER_TOKEN)

    async def spellings(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary spells it."""
        spelling = self.tokenizer.backend.id_to_token
        return await self._run(
            lambda: [spelling(token_id) or "" for token_id in token_ids], len(token_ids) * _CHARACTERS_PER_TOKEN
        )

    async def _tokenize(
        self,
        make_text: Callable[[], PlacedText],
        cost: float,
        max_model_len: int | None,
        tenant: str,
        add_special_tokens: bool,
        check_length: bool,
    ) -> Tokens:
        """`cost`: what making the text and finding what is known of it takes, in characters to be tokenized."""

        def check_number(num_tokens: int) -> None:
            if check_length and max_model_len is not None:
                check_prompt_length(num_tokens, max_model_len)

        def finish(split: SplitText, offsets: Sequence[PlaceOffsets]) -> Tokens:
            return self._piecewise.tokenize(
                split, add_special_tokens=add_special_tokens, check_number=check_number, places=offsets
            )

        def begin() -> tuple[SplitText, Sequence[PlaceOffsets]] | Tokens:
            text, offsets = make_text()
            self._refuse_hopeless(text, max_model_len)
            split = self._piecewise.split(text, tenant)
            return (split, offsets) if split.num_unknown_characters > LONG_PROMPT_CHARACTERS else finish(split, offsets)

        begun = await self._run(begin, cost)
        if isinstance(begun, Tokens):
            return begun
        split, offsets = begun
        return await self._run(lambda: finish(split, offsets), split.num_unknown_characters)

    def _refuse_hopeless(self, text: str, max_model_len: int | None) -> None:
        """Raises PromptTooLongError for a text that is certainly too long, before it costs anything."""
        utf8 = text.encode()
        if len(utf8) <= ALWAYS_COUNTED_BYTES:
            return
        if max_model_len is None:
            raise PromptError(
                f"the prompt has {len(utf8)} bytes of text; until an engine has answered, at most"
                f" {ALWAYS_COUNTED_BYTES} are tokenized"
            )
        if (num_tokens := self._least_tokens(utf8)) >= max_model_len:
            raise PromptTooLongError(num_tokens, max_model_len, len(utf8))

    async def _run(self, prepare: Callable[[], T], cost: float) -> T:
        """`cost`: in characters to be tokenized."""
        if cost <= _AT_ONCE_COST:
            return prepare()
        pool = self._long if cost > LONG_PROMPT_CHARACTERS else self._short
        return await asyncio.get_running_loop().run_in_executor(pool, prepare)


def check_prompt_length(num_tokens: int, max_model_len: int) -> None:
    """Raises PromptTooLongError unless at least one token is left for the output."""
    if num_tokens >= max_model_len:
        raise PromptTooLongError(num_tokens, max_model_len)
