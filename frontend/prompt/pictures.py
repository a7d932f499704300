"""The pictures of a chat → what stands for them in its prompt, and what an engine is told of them."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from frontend.feature_supply import FeatureError
from ipc.vocabulary import ExtraKeySpan, MultimodalFeature, RequestError
from multimodal import OptionError, Picture, PictureError, Pictures, PictureSource, PictureStats, PlaceholderError

from .canonical_json import JsonText, canonical_object
from .chat import Chat
from .errors import PromptError
from .place_offsets import PlaceOffsets
from .prompt import Prompt

MAX_SETTINGS_BYTES = 16_384


class ChatPictures:
    """What the frontend makes of the pictures of chats. Use from one event loop; `close()` it at the end.

    `pictures` is closed with this.
    """

    def __init__(self, pictures: Pictures) -> None:
        self.pictures = pictures
        self.processor = pictures.processor

    @property
    def image_token(self) -> str:
        """What stands for a picture in the text that the chat template makes."""
        return self.processor.image_token

    @property
    def spellings(self) -> Sequence[str]:
        """What no text of a client may hold."""
        return self.processor.spellings

    @property
    def stats(self) -> PictureStats:
        return self.pictures.stats

    async def close(self) -> None:
        await self.pictures.close()

    def sources(self, chat: Chat) -> list[PictureSource]:
        """The chat's pictures as they are to be loaded.

        Raises PromptError: there are too many, or `chat.picture_settings` has some that this model does not.
        """
        pictures = chat.pictures
        if not pictures and chat.picture_settings is None:
            return []
        asked = chat.picture_settings
        settings = None if asked is None else _settings(asked)
        try:
            options = {detail: self.processor.options(detail, settings) for detail in ("auto", "low", "high")}
        except OptionError as error:
            raise PromptError(str(error), None if asked is None else asked.field) from error
        sources = [
            PictureSource(where=picture.field, options=options[picture.detail], url=picture.url, uuid=picture.uuid)
            for picture in pictures
        ]
        with _naming_the_part():
            self.pictures.check_number(sources)
        return sources

    async def load(self, sources: Sequence[PictureSource], tenant: str) -> list[Picture]:
        """Raises PromptError naming the first of `sources` that cannot be had, is no picture or over a limit."""
        with _naming_the_part():
            return await self.pictures.prepare(sources, tenant)

    def expand(self, text: str, pictures: Sequence[Picture]) -> str:
        """`text` with each picture in the place of its image token. Raises PromptError: there are not as many."""
        try:
            return self.processor.expand(text, [picture.layout for picture in pictures])
        except PlaceholderError as error:
            raise PromptError(str(error)) from error

    def expanded(self, text: str, places: Sequence[PlaceOffsets], pictures: Sequence[Picture]) -> list[PlaceOffsets]:
        """Where `places` of `text` are in what `expand` makes of it. Of an image token they have all or nothing."""
        size = len(self.image_token)
        begins = [found.start() for found in re.finditer(re.escape(self.image_token), text)]
        longer = [len(picture.layout.replacement) - size for picture in pictures]
        moved = list(accumulate(longer, initial=0))

        def move(offset: int, *, after: bool = False) -> int:
            number = bisect_left(begins, offset)
            if number and offset < begins[number - 1] + size:
                offset = begins[number - 1] + after * size
                number -= not after
            return offset + moved[number]

        def settled(start: int) -> int:
            # Whether the only picture before it is the only one of all is for what follows to say.
            if bisect_left(begins, start) == 1 and pictures[0].layout.stands_alone is not None:
                return begins[0]
            return start

        return [
            PlaceOffsets(move(settled(place.start)), move(place.shown), move(place.end, after=True)) for place in places
        ]

    def prompt(self, token_ids: list[int], pictures: Sequence[Picture]) -> Prompt:
        """Of the tokens of a text with `pictures`.

        Raises PromptError: there are placeholder tokens that are no picture's.
        """
        try:
            placeholders = self.processor.placeholders(token_ids, [picture.layout for picture in pictures])
        except PlaceholderError as error:
            raise PromptError(str(error)) from error
        features = tuple(
            MultimodalFeature(
                key=picture.key,
                start=placeholder.start,
                num_tokens=placeholder.num_tokens,
                embed_ranges=placeholder.embed_ranges,
                num_input_bytes=picture.layout.num_input_bytes,
                layout=picture.layout.layout,
            )
            for picture, placeholder in zip(pictures, placeholders, strict=True)
        )
        spans = tuple(
            ExtraKeySpan(start, end, "mm", picture.content_hash.hex())
            for picture, (start, end) in zip(pictures, self.processor.mm_spans(placeholders), strict=True)
        )
        return Prompt(token_ids, features, spans, PictureInputs(self.pictures, pictures))


def before_what_it_decides(start: int, spans: Sequence[ExtraKeySpan]) -> int:
    """The last token up to `start` that is in the midst of none of `spans`: pictures that touch may see each other."""
    return min([start, *(span.start for span in spans if span.start < start and not (span.end and span.end <= start))])


def _settings(asked: JsonText) -> dict[str, Any]:
    # Read where others wait; no image processor has so many.
    if len(asked.text) > MAX_SETTINGS_BYTES:
        raise PromptError(
            f"{asked.field} has {len(asked.text)} bytes; at most {MAX_SETTINGS_BYTES} are allowed", asked.field
        )
    return canonical_object(asked)


@contextmanager
def _naming_the_part() -> Iterator[None]:
    """PictureErrors become PromptErrors."""
    try:
        yield
    except PictureError as error:
        raise PromptError(f"{error.where}: {error}", error.where) from error


@dataclass(frozen=True, slots=True)
class PictureInputs:
    """What the model takes of a prompt's pictures, made when an engine asks for it."""

    maker: Pictures
    pictures: Sequence[Picture]

    async def inputs(self, key: bytes) -> Mapping[str, np.ndarray]:
        """See `FeatureSource`."""
        picture = next((picture for picture in self.pictures if picture.key == key), None)
        if picture is None:
            raise FeatureError(RequestError("internal", "the engine wants a picture that its prompt has not"))
        try:
            return await self.maker.inputs(picture)
        except PictureError as error:
            raise FeatureError(RequestError("invalid", f"{error.where}: {error}", error.where)) from error
