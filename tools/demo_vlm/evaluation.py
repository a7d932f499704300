"""How many answers are right, word for word, on pictures and questions that were not learnt from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch

from .chats import about_no_picture, ask_about_two, follow_up, talk
from .drawing import NUM_PATCHES
from .model import ASSISTANT, BOS, END, IMAGE, USER
from .questions import KINDS_OF_QUESTION, Question, ask
from .scenes import UNSEEN_PAIRS, Scene
from .training import Pictures, normalised

_BATCH = 32
_SEED = 424_242


@dataclass(slots=True)
class Score:
    asked: int = 0
    right: int = 0


@dataclass(frozen=True, slots=True)
class Case:
    """`history` are earlier questions of the chat with their answers, `pictures` indices of what is shown first."""

    kind: str
    pictures: tuple[int, ...]
    history: tuple[Question, ...]
    question: Question


def held_out_cases(pictures: Pictures, per_kind: int) -> list[Case]:
    """About `per_kind` cases of every kind of question."""
    random = Random(_SEED)
    scenes = pictures.scenes
    cases: list[Case] = []
    for kind in KINDS_OF_QUESTION:
        cases += _collect(per_kind, lambda index, kind=kind: _about_one(random, scenes, index, kind), len(scenes))
    cases += _collect(3 * per_kind, lambda index: _about_two(random, scenes, index), len(scenes))
    cases += _collect(per_kind, lambda index: _followed_up(random, scenes, index), len(scenes))
    for _ in range(per_kind):
        question = talk(random, random.choice(scenes))
        cases.append(Case(question.kind, (), (), question))
        # The same kinds later in a chat, and beside a picture.
        before, question = talk(random, random.choice(scenes)), talk(random, random.choice(scenes))
        cases.append(Case(f"second turn: {question.kind}", (), (before,), question))
        cases.append(
            Case("small talk beside a picture", (random.randrange(len(scenes)),), (), about_no_picture(random))
        )
    return cases


def unseen_pair_cases(pictures: Pictures, per_kind: int) -> list[Case]:
    """Questions whose answer is one half of a shape-colour pair that no training picture has."""
    random = Random(_SEED + 1)
    cases: list[Case] = []
    for kind in ("colour", "shape", "yes/no: is it", "description"):

        def case(index: int, kind: str = kind) -> Case | None:
            found = _about_one(random, pictures.scenes, index, kind)
            return found if found is not None and _is_about_unseen(pictures.scenes[index], found.question) else None

        cases += [
            Case(f"unseen pair: {kind}", each.pictures, (), each.question)
            for each in _collect(per_kind, case, len(pictures.scenes))
        ]
    return cases


def evaluate(
    model: Any, tokenize: Callable[[str], list[int]], pictures: Pictures, cases: list[Case], scores: dict[str, Score]
) -> Iterator[int]:
    """Add each case to its kind's score. Yields the number of cases done.

    An answer is right if every token of it, its end included, is the likeliest one after those before it: exactly
    where greedy decoding writes the whole answer.
    """
    prompts = [(_prompt(case, tokenize), [*tokenize(case.question.answer), END]) for case in cases]
    order = sorted(range(len(cases)), key=lambda index: len(prompts[index][0]))
    for start in range(0, len(order), _BATCH):
        batch = order[start : start + _BATCH]
        for index, is_right in zip(batch, _are_right(model, pictures, cases, prompts, batch), strict=True):
            score = scores.setdefault(cases[index].kind, Score())
            score.asked += 1
            score.right += is_right
        yield len(batch)


@torch.inference_mode()
def _are_right(
    model: Any, pictures: Pictures, cases: list[Case], prompts: list[tuple[list[int], list[int]]], batch: list[int]
) -> list[bool]:
    sequences = [prompts[index][0] + prompts[index][1] for index in batch]
    longest = max(len(sequence) for sequence in sequences)
    token_ids = torch.zeros(len(batch), longest, dtype=torch.long)
    for row, sequence in zip(token_ids, sequences, strict=True):
        row[: len(sequence)] = torch.tensor(sequence)
    chosen = [picture for index in batch for picture in cases[index].pictures]
    inputs = {"pixel_values": normalised(pictures.pixels[np.array(chosen)])} if chosen else {}
    # Padding is on the right, where a causal model does not look.
    likeliest = model(input_ids=token_ids, use_cache=False, **inputs).logits.argmax(-1)
    found = []
    for place, index in enumerate(batch):
        prompt, answer = prompts[index]
        said = likeliest[place, len(prompt) - 1 : len(prompt) - 1 + len(answer)]
        found.append(said.tolist() == answer)
    return found


def _prompt(case: Case, tokenize: Callable[[str], list[int]]) -> list[int]:
    ids = [BOS, USER, *[IMAGE] * (NUM_PATCHES * len(case.pictures))]
    for turn in case.history:
        ids += [*tokenize(turn.text), END, ASSISTANT, *tokenize(turn.answer), END, USER]
    return [*ids, *tokenize(case.question.text), END, ASSISTANT]


def _collect(count: int, make: Callable[[int], Case | None], num_scenes: int) -> list[Case]:
    found = (make(index % num_scenes) for index in range(20 * count))
    return [case for case, _ in zip((case for case in found if case is not None), range(count))]


def _about_one(random: Random, scenes: list[Scene], index: int, kind: str) -> Case | None:
    try:
        return Case(kind, (index,), (), ask(random, scenes[index], kind))
    except LookupError:
        return None


def _about_two(random: Random, scenes: list[Scene], index: int) -> Case:
    other = random.randrange(len(scenes))
    question = ask_about_two(random, (scenes[index], scenes[other]))
    return Case(question.kind, (index, other), (), question)


def _followed_up(random: Random, scenes: list[Scene], index: int) -> Case | None:
    before = ask(random, scenes[index])
    question = follow_up(random, scenes[index], before)
    return None if question is None else Case(question.kind, (index,), (before,), question)


def _is_about_unseen(scene: Scene, question: Question) -> bool:
    pairs = [(thing.noun, thing.colour) for thing in scene.things if (thing.kind, thing.colour) in UNSEEN_PAIRS]
    said = f"{question.text} {question.answer}"
    return any(noun in said and colour in said for noun, colour in pairs)
