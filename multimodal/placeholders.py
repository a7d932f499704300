"""From rendered text to token positions: where in a prompt its pictures are, and which positions their content decides.

A picture's placeholder reaches from the first to the last token that its encoder's rows replace. What the processor
writes before and after them (`<|vision_start|>`, blank lines) is the same for every picture, hence ordinary text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .layout import ImageLayout


class PlaceholderError(ValueError):
    """Text or tokens have not the pictures that they should have: another number of them, or other ones."""


@dataclass(frozen=True, slots=True)
class Placeholder:
    """One picture's tokens: `[start, start + num_tokens)`, the first and the last of them embedded.

    `embed_ranges`, relative to `start`, half open, ascending: those that the encoder's rows replace, in order.
    """

    start: int
    num_tokens: int
    embed_ranges: tuple[tuple[int, int], ...]

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


def expand(text: str, image_token: str, layouts: Sequence[ImageLayout]) -> str:
    """Put the i-th layout's replacement in the place of the i-th `image_token` of `text`.

    Raises:
        PlaceholderError: there are not as many of one as of the other.
    """
    parts = text.split(image_token)
    if len(parts) - 1 != len(layouts):
        raise PlaceholderError(f"the text has {len(parts) - 1} times {image_token!r} for {len(layouts)} pictures")
    pieces = [parts[0]]
    for layout, part in zip(layouts, parts[1:], strict=True):
        pieces += layout.replacement, part
    return "".join(pieces)


def find_placeholders(
    token_ids: Sequence[int], embed_token_id: int, layouts: Sequence[ImageLayout]
) -> list[Placeholder]:
    """Find the tokens of each picture, in order; those that touch are told apart by how many each has.

    Raises:
        PlaceholderError: the tokens with `embed_token_id` are not those that the layouts ask for.
    """
    positions = np.flatnonzero(np.asarray(token_ids, dtype=np.int64) == embed_token_id)
    wanted = sum(layout.num_embeds for layout in layouts)
    if len(positions) != wanted:
        raise PlaceholderError(
            f"the prompt has {len(positions)} image tokens; its {len(layouts)} pictures fill {wanted}"
        )
    found = []
    taken = 0
    for number, layout in enumerate(layouts, start=1):
        own = positions[taken : taken + layout.num_embeds]
        taken += layout.num_embeds
        runs = np.split(own, np.flatnonzero(np.diff(own) != 1) + 1)
        if tuple(map(len, runs)) != layout.embed_runs:
            raise PlaceholderError(f"the tokens of picture {number} are not laid out as its size wants it")
        start = int(own[0])
        ranges = tuple((int(run[0]) - start, int(run[-1]) + 1 - start) for run in runs)
        found.append(Placeholder(start, int(own[-1]) + 1 - start, ranges))
    return found


def content_spans(placeholders: Sequence[Placeholder], *, joins_touching: bool) -> list[tuple[int, int]]:
    """For each picture the positions `[start, end)` whose keys and values its content decides.

    They are its placeholder; where the model lets touching pictures see each other (`joins_touching`), the whole group.
    """
    if not joins_touching:
        return [(placeholder.start, placeholder.end) for placeholder in placeholders]
    groups: list[list[Placeholder]] = []
    for placeholder in placeholders:
        if groups and groups[-1][-1].end == placeholder.start:
            groups[-1].append(placeholder)
        else:
            groups.append([placeholder])
    return [(group[0].start, group[-1].end) for group in groups for _ in group]
