"""Chats about pictures that the built-in model has not learnt from, with the answers that are right."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from PIL import Image

from tests.frontend.picture_app import user
from tools.demo_vlm.chats import ask_about_two, follow_up, talk
from tools.demo_vlm.drawing import draw
from tools.demo_vlm.questions import KINDS_OF_QUESTION, Question, ask, how_many, unique_nouns
from tools.demo_vlm.scenes import COLOUR_NAMES, DIGITS, UNSEEN_PAIRS, Scene, sample_scene

# Neither what `tools.train_demo_vlm` learns from nor what it measures with.
_SEED = 770_077
_PER_KIND, _NUM_ABOUT_TWO, _NUM_FOLLOWED_UP, _NUM_TWINS, _NUM_TALKS = 8, 20, 16, 16, 12
_LARGER = 4
_JPEG_QUALITY = 95


@dataclass(frozen=True, slots=True, eq=False)
class PictureFile:
    """`form` is "plain" (PNG, as large as the model sees it), "larger" (PNG) or "JPEG"."""

    scene: Scene
    form: str
    media_type: str
    content: bytes

    def opened(self) -> Image.Image:
        return Image.open(io.BytesIO(self.content)).convert("RGB")


@dataclass(frozen=True, slots=True, eq=False)
class Chat:
    """`files` are shown with the first of `history` (earlier questions, answered rightly) and `question`."""

    files: tuple[PictureFile, ...]
    history: tuple[Question, ...]
    question: Question

    @property
    def form(self) -> str:
        return self.files[0].form if self.files else "plain"

    def messages(self, part: Callable[[PictureFile], dict[str, Any]]) -> list[dict[str, Any]]:
        """With the pictures as `part` writes them."""
        messages: list[dict[str, Any]] = []
        shown = [part(file) for file in self.files]
        for turn in (*self.history, self.question):
            answer = {"role": "assistant", "content": [{"type": "text", "text": turn.answer}]}
            messages += [user(*shown, turn.text), answer]
            shown = []
        return messages[:-1]


def held_out_chats() -> list[Chat]:
    """About 200 pictures, none of which is in two chats.

    Every kind of question, two pictures, follow-ups, no picture, and twins: pictures that differ in one shape's colour,
    with the same question.
    """
    random = Random(_SEED)
    chats: list[Chat] = []
    for kind in KINDS_OF_QUESTION:
        chats += [_about_one(random, kind, number) for number in range(_PER_KIND)]
    chats += [_about_two(random, number) for number in range(_NUM_ABOUT_TWO)]
    chats += [_followed_up(random, number) for number in range(_NUM_FOLLOWED_UP)]
    for _ in range(_NUM_TWINS):
        chats += _twins(random)
    chats += [Chat((), (), talk(random, sample_scene(random))) for _ in range(_NUM_TALKS)]
    return chats


def same_question(chats: list[Chat]) -> list[Chat]:
    """One question about the pictures of all of `chats`."""
    return [
        Chat((file,), (), Question("count", "How many shapes are there?", how_many(len(file.scene.things), "shape")))
        for chat in chats
        for file in chat.files
    ]


def _about_one(random: Random, kind: str, number: int) -> Chat:
    while True:
        scene = sample_scene(random)
        try:
            return Chat((_file(random, scene, number),), (), ask(random, scene, kind))
        except LookupError:
            continue


def _about_two(random: Random, number: int) -> Chat:
    scenes = sample_scene(random), sample_scene(random)
    files = tuple(_file(random, scene, number) for scene in scenes)
    return Chat(files, (), ask_about_two(random, scenes))


def _followed_up(random: Random, number: int) -> Chat:
    while True:
        scene = sample_scene(random)
        before = ask(random, scene)
        question = follow_up(random, scene, before)
        if question is not None:
            return Chat((_file(random, scene, number),), (before,), question)


def _twins(random: Random) -> list[Chat]:
    while True:
        scene = sample_scene(random)
        thing = next((thing for thing in unique_nouns(scene) if thing.kind not in DIGITS), None)
        if thing is not None:
            break
    used = {scene.background, *(each.colour for each in scene.things)}
    free = [name for name in COLOUR_NAMES if name not in used and (thing.kind, name) not in UNSEEN_PAIRS]
    changed = replace(thing, colour=random.choice(free))
    twin = replace(scene, things=tuple(changed if each is thing else each for each in scene.things))
    seed = random.getrandbits(32)
    return [
        Chat(
            (_file(Random(seed), each, 0),),
            (),
            Question("colour", f"What colour is the {thing.noun}?", f"The {thing.noun} is {colour}."),
        )
        for each, colour in ((scene, thing.colour), (twin, changed.colour))
    ]


def _file(random: Random, scene: Scene, number: int) -> PictureFile:
    """Two of every `_PER_KIND` numbers are not plain."""
    form = {_PER_KIND - 2: "larger", _PER_KIND - 1: "JPEG"}.get(number % _PER_KIND, "plain")
    pixels, _ = draw(random, scene, _LARGER if form == "larger" else 1)
    file = io.BytesIO()
    if form == "JPEG":
        Image.fromarray(pixels).save(file, "JPEG", quality=_JPEG_QUALITY)
        return PictureFile(scene, form, "image/jpeg", file.getvalue())
    Image.fromarray(pixels).save(file, "PNG")
    return PictureFile(scene, form, "image/png", file.getvalue())
