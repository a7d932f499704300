"""Chats → rows of a training batch.

A row holds groups, each a chat's beginning (BOS, pictures) and several independent ways on from there. A token sees
its group's beginning and its own way only, at the positions it would have in a chat of its own: so one picture's 64
tokens serve many questions, and no answer is seen by the next question.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np

from .chats import SYSTEM_PROMPTS, about_no_picture, ask_about_two, follow_up, talk
from .drawing import NUM_PATCHES
from .model import ASSISTANT, BOS, END, IMAGE, SYSTEM, USER
from .questions import Question, ask
from .scenes import Scene

ROW_TOKENS = 256
NOT_LEARNT = -100

_SHORTEST_GROUP = 24
_LONGEST_TURN = 48


@dataclass(slots=True)
class Row:
    """Lists of one length, at most `ROW_TOKENS`. `labels[i]` is the token that position i must predict.

    `pictures` are indices into the scenes, in the order of their tokens.
    """

    token_ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    ways: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    pictures: list[int] = field(default_factory=list)


class RowMaker:
    """`tokenize` makes token ids of a text, without special tokens; `style` another answer of the right one."""

    def __init__(
        self, scenes: list[Scene], tokenize: Callable[[str], list[int]], style: Callable[[str], str] = str
    ) -> None:
        self._scenes = scenes
        self._tokenize = tokenize
        self._style = style
        self._known: dict[str, list[int]] = {}

    def row(self, random: Random) -> Row:
        """A full row of random groups."""
        row = Row()
        while ROW_TOKENS - len(row.token_ids) >= _SHORTEST_GROUP:
            kind = random.random()
            room = ROW_TOKENS - len(row.token_ids)
            if room < NUM_PATCHES + _LONGEST_TURN or kind < 0.03:
                self._add_talk(random, row)
            elif kind < 0.55 or room < 2 * NUM_PATCHES + _LONGEST_TURN:
                self._add_questions(random, row)
            elif kind < 0.68:
                self._add_chat(random, row)
            else:
                self._add_two_pictures(random, row)
        return row

    def _add_talk(self, random: Random, row: Row) -> None:
        group = _Group(row)
        group.begin([BOS, *self._system(random), USER])
        turns = [talk(random, random.choice(self._scenes)) for _ in range(random.choice((1, 1, 2, 3)))]
        # All that fits: a chat's first turns are a chat, too.
        while turns and not group.way(*self._turns(turns)):
            turns.pop()

    def _add_questions(self, random: Random, row: Row) -> None:
        picture = random.randrange(len(self._scenes))
        scene = self._scenes[picture]
        group = _Group(row)
        if random.random() < 0.08:
            # The question first, then the picture.
            question = ask(random, scene)
            group.begin([BOS, *self._system(random), USER, *self.tokens(question.text)])
            group.picture(picture)
            group.way(*self._answer(question))
            return
        group.begin([BOS, *self._system(random), USER])
        group.picture(picture)
        # Not all that fit: other pictures teach more than the tenth question about this one.
        for _ in range(random.randint(3, 8)):
            question = about_no_picture(random) if random.random() < 0.06 else ask(random, scene)
            if not group.way(*self._turn(question)):
                return

    def _add_chat(self, random: Random, row: Row) -> None:
        picture = random.randrange(len(self._scenes))
        scene = self._scenes[picture]
        group = _Group(row)
        group.begin([BOS, *self._system(random), USER])
        if random.random() < 0.3:
            # Somebody says hello before they show something.
            ids, labels = self._turn(talk(random, scene))
            group.extend([*ids, USER], [*labels, NOT_LEARNT])
        group.picture(picture)
        for _ in range(2):
            questions = [ask(random, scene, "colour") if random.random() < 0.4 else ask(random, scene)]
            for _ in range(random.randint(1, 3)):
                then = follow_up(random, scene, questions[-1]) if random.random() < 0.7 else None
                if then is None and random.random() < 0.15:
                    then = about_no_picture(random)
                questions.append(then or ask(random, scene))
            if not group.way(*self._turns(questions)):
                return

    def _add_two_pictures(self, random: Random, row: Row) -> None:
        first, second = (random.randrange(len(self._scenes)) for _ in range(2))
        scenes = self._scenes[first], self._scenes[second]
        group = _Group(row)
        group.begin([BOS, *self._system(random), USER])
        group.picture(first)
        if random.random() < 0.25:
            # The second picture comes in the second turn, and the questions may be about either, or about it.
            ids, labels = self._turn(ask(random, scenes[0]))
            group.extend([*ids, USER], [*labels, NOT_LEARNT])
            group.picture(second)
            for _ in range(4):
                question = ask(random, scenes[1]) if random.random() < 0.6 else ask_about_two(random, scenes)
                if not group.way(*self._turn(question)):
                    return
            return
        group.picture(second)
        for _ in range(8):
            if not group.way(*self._turn(ask_about_two(random, scenes))):
                return

    def _system(self, random: Random) -> list[int]:
        if random.random() > 0.1:
            return []
        return [SYSTEM, *self.tokens(random.choice(SYSTEM_PROMPTS)), END]

    def _turns(self, questions: list[Question]) -> tuple[list[int], list[int]]:
        ids, labels = self._turn(questions[0])
        for question in questions[1:]:
            more_ids, more_labels = self._turn(question)
            ids += [USER, *more_ids]
            labels += [NOT_LEARNT, *more_labels]
        return ids, labels

    def _turn(self, question: Question) -> tuple[list[int], list[int]]:
        asked = self.tokens(question.text)
        ids, labels = self._answer(question)
        return [*asked, *ids], [NOT_LEARNT] * len(asked) + labels

    def _answer(self, question: Question) -> tuple[list[int], list[int]]:
        answer = self.tokens(self._style(question.answer))
        # The end that is predicted is not the end of the question, though it is the same token.
        return [END, ASSISTANT, *answer, END], [NOT_LEARNT, *answer, END, NOT_LEARNT]

    def tokens(self, text: str) -> list[int]:
        if text not in self._known:
            self._known[text] = self._tokenize(text)
        return self._known[text]


class _Group:
    """The group of a row that is being written."""

    def __init__(self, row: Row) -> None:
        self._row = row
        self._number = row.groups[-1] + 1 if row.groups else 0
        self._num_shared = 0
        self._num_ways = 0

    def begin(self, token_ids: list[int]) -> None:
        self.extend(token_ids, [NOT_LEARNT] * len(token_ids))

    def picture(self, index: int) -> None:
        self.begin([IMAGE] * NUM_PATCHES)
        self._row.pictures.append(index)

    def extend(self, token_ids: list[int], labels: list[int]) -> None:
        """More of the beginning that all ways share."""
        self._write(token_ids, labels, 0)
        self._num_shared += len(token_ids)

    def way(self, token_ids: list[int], labels: list[int]) -> bool:
        """One way on from the beginning. False, and nothing written, if the row has no room for it."""
        if len(self._row.token_ids) + len(token_ids) > ROW_TOKENS:
            return False
        self._num_ways += 1
        self._write(token_ids, labels, self._num_ways)
        return True

    def _write(self, token_ids: list[int], labels: list[int], way: int) -> None:
        row = self._row
        # A beginning of two turns may be longer than the row's rest: what is cut off is not learnt.
        length = min(len(token_ids), ROW_TOKENS - len(row.token_ids))
        row.token_ids += token_ids[:length]
        row.labels += labels[:length]
        row.groups += [self._number] * length
        row.ways += [way] * length
        row.positions += range(self._num_shared, self._num_shared + length)


def visible(rows: list[Row]) -> np.ndarray:
    """`[num_rows, ROW_TOKENS, ROW_TOKENS]` bool: whether a token (second axis) sees another. All see themselves."""
    group = padded([row.groups for row in rows], -1)
    way = padded([row.ways for row in rows], -1)
    same_group = group[:, :, None] == group[:, None, :]
    same_way = (way[:, None, :] == 0) | (way[:, :, None] == way[:, None, :])
    causal = np.tril(np.ones((ROW_TOKENS, ROW_TOKENS), bool))
    return (same_group & same_way & causal) | np.eye(ROW_TOKENS, dtype=bool)


def padded(rows: list[list[int]], value: int) -> np.ndarray:
    """`[num_rows, ROW_TOKENS]`."""
    out = np.full((len(rows), ROW_TOKENS), value, np.int64)
    for line, row in zip(out, rows, strict=True):
        line[: len(row)] = row
    return out
