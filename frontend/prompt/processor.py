"""Prompts are rendered and tokenized in threads, so that a long one stalls neither the event loop nor short ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from .chat import Chat
from .errors import ChatTemplateError, PromptError, PromptTooLongError
from .least_tokens import least_tokens_of
from .pictures import ChatPictures
from .prompt import Prompt
from .spellings import refuse_spellings
from .tokenizer import ModelTokenizer

T = TypeVar("T")

# What takes longer than about 10 ms waits in its own line.
LONG_PROMPT_CHARACTERS = 32_768
# Up to here tokens are counted, though it may be certain that they are too many. This takes about 2 s and 300 MB.
ALWAYS_COUNTED_BYTES = 2 << 20

_CHARACTERS_PER_TOKEN = 4


class PromptProcessor:
    """Turns chats and texts into token ids. Use from one event loop; `close()` it at the end.

    Long prompts share one thread, short ones have `num_threads` others: the wait of a short prompt does not
    depend on how many long ones are being tokenized. A prompt whose caller is cancelled before its turn is dropped.

    Attributes:
        pictures: None for models that take none. Not closed here.
    """

    def __init__(
        self, tokenizer: ModelTokenizer, pictures: ChatPictures | None = None, *, num_threads: int = 2
    ) -> None:
        self.tokenizer = tokenizer
        self.pictures = pictures
        self._least_tokens = least_tokens_of(tokenizer.backend)
        self._short = ThreadPoolExecutor(num_threads, thread_name_prefix="prompt")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long_prompt")

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
    ) -> Prompt:
        """The chat as a prompt. By default the template alone decides about BOS.

        Nothing that is kept of its pictures is used for another `tenant`.

        Raises:
            ChatTemplateError: the model has no chat template, or the template refuses this chat.
            PromptError: see `ChatTemplate.render`, `text`, `ChatPictures.sources` and `ChatPictures.load`; or a text
                spells what stands for a picture.
            PromptTooLongError: see `text`.
        """
        template = self.tokenizer.chat_template
        if template is None:
            raise ChatTemplateError("this model has no chat template; use /v1/completions")
        pictures = self.pictures

        def render() -> str:
            if pictures is not None:
                refuse_spellings(chat, pictures.spellings)
            return template.render(chat)

        def encode(text: str) -> list[int]:
            return self._encode(text, max_model_len, add_special_tokens, check_length)

        sources = [] if pictures is None else pictures.sources(chat)
        if pictures is None or not sources:
            return await self._run(lambda: Prompt(encode(render())), chat.num_characters())
        # What is wrong with the chat is found before anything is fetched.
        text = await self._run(render, chat.num_characters())
        loaded = await pictures.load(sources, tenant)
        num_characters = len(text) + sum(len(picture.layout.replacement) for picture in loaded)
        return await self._run(lambda: pictures.prompt(text, loaded, encode), num_characters)

    async def text(
        self, text: str, *, max_model_len: int | None, add_special_tokens: bool = True, check_length: bool = True
    ) -> list[int]:
        """Token ids of a bare text, by default with BOS if the tokenizer adds one.

        `max_model_len` is None while no engine has told it.

        Raises:
            PromptTooLongError: fewer than one token would be left for the answer. Without `check_length` only a text
                that is very long, too, is refused.
            PromptError: the text is very long, and `max_model_len` is None.
        """

        def prepare() -> list[int]:
            return self._encode(text, max_model_len, add_special_tokens, check_length)

        return await self._run(prepare, len(text))

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens spelled out. Ids that stand for no token have no text."""
        return await self._run(lambda: self.tokenizer.decode(token_ids), len(token_ids) * _CHARACTERS_PER_TOKEN)

    async def spellings(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary spells it."""
        spelling = self.tokenizer.backend.id_to_token
        return await self._run(
            lambda: [spelling(token_id) or "" for token_id in token_ids], len(token_ids) * _CHARACTERS_PER_TOKEN
        )

    def _encode(self, text: str, max_model_len: int | None, add_special_tokens: bool, check_length: bool) -> list[int]:
        self._refuse_hopeless(text, max_model_len)
        tokens = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if check_length and max_model_len is not None:
            check_prompt_length(len(tokens), max_model_len)
        return tokens.ids

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

    async def _run(self, prepare: Callable[[], T], num_characters: int) -> T:
        pool = self._long if num_characters > LONG_PROMPT_CHARACTERS else self._short
        return await asyncio.get_running_loop().run_in_executor(pool, prepare)


def check_prompt_length(num_tokens: int, max_model_len: int) -> None:
    """Raises PromptTooLongError unless at least one token is left for the output."""
    if num_tokens >= max_model_len:
        raise PromptTooLongError(num_tokens, max_model_len)
