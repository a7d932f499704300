"""What can be in a picture: up to three shapes, one of which may be a digit, in named colours on a named background.

Everything here is in pixels of the `SIDE` × `SIDE` picture that the model sees.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

SIDE = 64

SHAPES = ("circle", "square", "triangle", "star", "cross", "heart")
DIGITS = tuple("0123456789")
KINDS = SHAPES + DIGITS

# A name covers several colours. Each is jittered when it is drawn.
COLOURS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "red": ((255, 0, 0), (220, 20, 60), (200, 10, 10), (235, 40, 40)),
    "green": ((0, 128, 0), (0, 220, 0), (34, 139, 34), (50, 200, 60)),
    "blue": ((0, 0, 255), (65, 105, 225), (30, 130, 250), (10, 20, 160)),
    "yellow": ((255, 255, 0), (255, 220, 0), (250, 230, 70)),
    "orange": ((255, 150, 0), (255, 125, 0), (245, 130, 30)),
    "purple": ((128, 0, 128), (150, 20, 210), (120, 50, 170)),
    "black": ((0, 0, 0), (20, 20, 20), (32, 32, 32)),
    "white": ((255, 255, 255), (246, 246, 246), (240, 240, 240)),
}
COLOUR_NAMES = tuple(COLOURS)

# In no training picture and in no training question: whoever knows them has understood shape and colour apart.
UNSEEN_PAIRS = frozenset(
    {
        ("circle", "orange"),
        ("square", "purple"),
        ("triangle", "green"),
        ("star", "blue"),
        ("cross", "yellow"),
        ("heart", "black"),
    }
)

_SIZES = {0: (0.0, 0.0), 1: (18.0, 50.0), 2: (15.0, 32.0), 3: (13.0, 26.0)}
_MIN_DIGIT_SIZE = 20.0


@dataclass(frozen=True, slots=True)
class Thing:
    """A shape or a digit, by the centre and the size of its box. `size` is the geometric mean of its sides."""

    kind: str
    colour: str
    x: float
    y: float
    width: float
    height: float

    @property
    def noun(self) -> str:
        return "number" if self.kind in DIGITS else self.kind

    @property
    def size(self) -> float:
        return math.sqrt(self.width * self.height)


@dataclass(frozen=True, slots=True)
class Scene:
    """A background with things on it, none over another. No thing has the background's colour."""

    background: str
    things: tuple[Thing, ...]


def sample_scene(random: Random, *, with_unseen_pair: bool = False) -> Scene:
    """A scene without any of `UNSEEN_PAIRS`, or with exactly one."""
    count = random.choices((0, 1, 2, 3), (3, 32, 37, 28))[0]
    if with_unseen_pair:
        count = max(1, count)
    # Pictures that are not square are squeezed into one by the processor: squeezed things are normal.
    aspect = math.exp(random.uniform(-0.3, 0.3)) if random.random() < 0.35 else 1.0
    things: list[Thing] = []
    for index in range(count):
        for _ in range(60):
            pair = _sample_pair(random, things, unseen=with_unseen_pair and index == 0)
            thing = None if pair is None else _place(random, pair, count, aspect, things)
            if thing is not None:
                things.append(thing)
                break
    used = {thing.colour for thing in things}
    free = [name for name in COLOUR_NAMES if name not in used]
    # White and black are what people draw on.
    weights = [{"white": 3.0, "black": 1.5}.get(name, 1.0) for name in free]
    return Scene(random.choices(free, weights)[0], tuple(things))


def _sample_pair(random: Random, things: list[Thing], *, unseen: bool) -> tuple[str, str] | None:
    if unseen:
        return random.choice(sorted(UNSEEN_PAIRS))
    has_digit = any(thing.kind in DIGITS for thing in things)
    if not has_digit and random.random() < 0.15:
        kind = random.choice(DIGITS)
    elif things and random.random() < 0.15:
        kind = random.choice([thing.kind for thing in things if thing.kind in SHAPES] or SHAPES)
    else:
        kind = random.choice(SHAPES)
    colour = random.choice(things).colour if things and random.random() < 0.15 else random.choice(COLOUR_NAMES)
    return None if (kind, colour) in UNSEEN_PAIRS else (kind, colour)


def _place(random: Random, pair: tuple[str, str], count: int, aspect: float, things: list[Thing]) -> Thing | None:
    least, most = _SIZES[count]
    if pair[0] in DIGITS:
        least, most = max(least, _MIN_DIGIT_SIZE), max(most, _MIN_DIGIT_SIZE + 4)
    size = random.uniform(least, most)
    width, height = size * math.sqrt(aspect), size / math.sqrt(aspect)
    if max(width, height) > SIDE - 4:
        return None
    x = random.uniform(width / 2 + 1, SIDE - width / 2 - 1)
    y = random.uniform(height / 2 + 1, SIDE - height / 2 - 1)
    for other in things:
        if abs(x - other.x) < (width + other.width) / 2 + 1 and abs(y - other.y) < (height + other.height) / 2 + 1:
            return None
    return Thing(*pair, x, y, width, height)
