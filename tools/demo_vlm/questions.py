"""Questions about one picture, in varied English, each with the one answer that is right.

What a person could argue about is not asked: a thing between "left" and "middle", two things almost equally large.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from .scenes import COLOUR_NAMES, DIGITS, SHAPES, SIDE, UNSEEN_PAIRS, Scene, Thing

NUMBERS = ("no", "one", "two", "three")
PICTURES = ("picture", "picture", "image", "photo")

_COLOUR_WORDS = ("colour", "colour", "color")
_MIN_GAP = 10.0
_MIN_SIZE_RATIO = 1.35
_MIN_ORDER_GAP = 5.0


@dataclass(frozen=True, slots=True)
class Question:
    """`kind` is what accuracy is told apart by."""

    kind: str
    text: str
    answer: str


# None where the scene does not allow such a question.
Asker = Callable[[Random, Scene], tuple[str, str] | None]


def ask(random: Random, scene: Scene, kind: str | None = None) -> Question:
    """A question about `scene`, of `kind` or of any kind. Raises LookupError if the scene allows none of that kind."""
    for _ in range(100):
        chosen = kind or random.choices(tuple(_ASKERS), _WEIGHTS)[0]
        found = _ASKERS[chosen](random, scene)
        if found is not None:
            return Question(chosen, casual(random, found[0]), found[1])
    raise LookupError(f"no question of kind {kind} about {scene}")


def casual(random: Random, text: str) -> str:
    """As people type: sometimes without capitals, question mark or the right spelling of grey."""
    if random.random() < 0.18:
        text = text[0].lower() + text[1:]
    if random.random() < 0.12:
        text = text.rstrip("?.")
    return text


def with_article(words: str) -> str:
    return ("an " if words[0] in "aeiou" else "a ") + words


def phrase(thing: Thing) -> str:
    """`a red star`, `a blue number 7`."""
    return with_article(
        f"{thing.colour} number {thing.kind}" if thing.kind in DIGITS else f"{thing.colour} {thing.kind}"
    )


def unique_nouns(scene: Scene) -> list[Thing]:
    nouns = [thing.noun for thing in scene.things]
    return [thing for thing in scene.things if nouns.count(thing.noun) == 1]


def place_of(thing: Thing) -> str | None:
    """Where it is, in words; None where that could be disputed."""
    row, column = _third(thing.y, ("top", "", "bottom")), _third(thing.x, ("left", "", "right"))
    if row is None or column is None:
        return None
    if row and column:
        return f"in the {row} {column}"
    if row:
        return f"at the {row}"
    return f"on the {column}" if column else "in the middle"


def description(scene: Scene) -> str:
    """From left to right."""
    phrases = [phrase(thing) for thing in sorted(scene.things, key=lambda thing: thing.x)]
    background = f"on {with_article(scene.background)} background."
    if not phrases:
        return f"Nothing but {with_article(scene.background)} background."
    listed = phrases[0] if len(phrases) == 1 else f"{', '.join(phrases[:-1])} and {phrases[-1]}"
    return f"{_capital(listed)} {background}"


def how_many(count: int, noun: str) -> str:
    if count == 1:
        return f"There is one {noun}."
    return f"There are {NUMBERS[count]} {noun}{'es' if noun.endswith('ss') else 's'}."


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _third(value: float, names: tuple[str, str, str]) -> str | None:
    share = value / SIDE
    if share < 0.37:
        return names[0]
    if share > 0.63:
        return names[2]
    return names[1] if 0.43 < share < 0.57 else None


def _definite(random: Random, scene: Scene, thing: Thing) -> str | None:
    """Words that fit this thing only."""
    things = scene.things
    options: list[str] = []
    if sum(other.noun == thing.noun for other in things) == 1:
        options += [thing.noun] * 3
    if sum((other.noun, other.colour) == (thing.noun, thing.colour) for other in things) == 1:
        options += [f"{thing.colour} {thing.noun}"] * 2
    if sum(other.colour == thing.colour for other in things) == 1:
        options.append(f"{thing.colour} shape")
    return random.choice(options) if options else None


def _said(random: Random, *forms: str, **words: str) -> str:
    return random.choice(forms).format(k=random.choice(_COLOUR_WORDS), p=random.choice(PICTURES), **words)


def _colour(random: Random, scene: Scene) -> tuple[str, str] | None:
    if len(scene.things) == 1 and random.random() < 0.3:
        thing = scene.things[0]
        text = _said(
            random, "What {k} is it?", "What {k} is this shape?", "What {k} is this?", "Which {k} does it have?"
        )
        return text, f"The {thing.noun} is {thing.colour}."
    forms = (
        *["What {k} is the {n}?"] * 4,
        "Which {k} is the {n}?",
        "Which {k} does the {n} have?",
        "What is the {k} of the {n}?",
        "What's the {k} of the {n}?",
        "Tell me the {k} of the {n}.",
        "Can you tell me what {k} the {n} is?",
        "What {k} is the {n} in the {p}?",
    )
    candidates = unique_nouns(scene)
    if not candidates or random.random() < 0.08:
        noun = random.choice([n for n in (*SHAPES, "number") if all(thing.noun != n for thing in scene.things)])
        return _said(random, *forms, n=noun), f"There is no {noun}."
    thing = random.choice(candidates)
    return _said(random, *forms, n=thing.noun), f"The {thing.noun} is {thing.colour}."


def _shape(random: Random, scene: Scene) -> tuple[str, str] | None:
    def name(thing: Thing) -> str:
        return f"the number {thing.kind}" if thing.kind in DIGITS else with_article(thing.kind)

    if len(scene.things) == 1 and random.random() < 0.4:
        text = _said(
            random, "What shape is this?", "What shape is it?", "What shape is in the {p}?", "Which shape do you see?"
        )
        return text, f"It is {name(scene.things[0])}."
    colours = [thing.colour for thing in scene.things]
    candidates = [thing for thing in scene.things if colours.count(thing.colour) == 1]
    forms = (
        *["What shape is {c}?", "Which shape is {c}?", "What is the {c} shape?"] * 2,
        "What shape is the {c} one?",
        "What is the {c} thing?",
        "Which shape has the {k} {c}?",
        "What kind of shape is {c}?",
        "Tell me which shape is {c}.",
    )
    if not candidates or random.random() < 0.08:
        absent = random.choice([c for c in COLOUR_NAMES if c not in colours and c != scene.background])
        return _said(random, *forms, c=absent), f"There is no {absent} shape."
    thing = random.choice(candidates)
    return _said(random, *forms, c=thing.colour), f"The {thing.colour} shape is {name(thing)}."


def _count(random: Random, scene: Scene) -> tuple[str, str] | None:
    text = _said(
        random,
        *["How many shapes are there?", "How many shapes are in the {p}?"] * 2,
        "How many shapes do you see?",
        "Count the shapes.",
        "How many objects are there?",
        "How many things are in the {p}?",
        "What is the number of shapes?",
    )
    return text, how_many(len(scene.things), "shape")


def _count_colour(random: Random, scene: Scene) -> tuple[str, str] | None:
    colours = [thing.colour for thing in scene.things]
    repeated = [colour for colour in colours if colours.count(colour) > 1]
    colour = random.choice(COLOUR_NAMES)
    if repeated and random.random() < 0.6:
        colour = random.choice(repeated)
    elif colours and random.random() < 0.65:
        colour = random.choice(colours)
    if colour == scene.background:
        return None
    text = _said(
        random,
        "How many {c} shapes are there?",
        "How many {c} shapes do you see?",
        "Count the {c} shapes.",
        "How many shapes are {c}?",
        "How many {c} things are in the {p}?",
        c=colour,
    )
    return text, how_many(colours.count(colour), f"{colour} shape")


def _count_shape(random: Random, scene: Scene) -> tuple[str, str] | None:
    kinds = [thing.kind for thing in scene.things if thing.kind in SHAPES]
    repeated = [kind for kind in kinds if kinds.count(kind) > 1]
    kind = random.choice(SHAPES)
    if repeated and random.random() < 0.6:
        kind = random.choice(repeated)
    elif kinds and random.random() < 0.65:
        kind = random.choice(kinds)
    text = _said(
        random,
        "How many {s} are there?",
        "How many {s} do you see?",
        "Count the {s}.",
        "How many {s} are in the {p}?",
        s=kind + ("es" if kind.endswith("ss") else "s"),
    )
    return text, how_many(kinds.count(kind), kind)


def _exists(random: Random, scene: Scene) -> tuple[str, str] | None:
    wanted = random.random() < 0.5
    nouns, colours = {thing.noun for thing in scene.things}, {thing.colour for thing in scene.things}
    pairs = {(thing.noun, thing.colour) for thing in scene.things}
    aspect = random.choices(("pair", "noun", "colour"), (3, 1, 1))[0]
    if wanted and not scene.things:
        return None
    if aspect == "noun":
        what = random.choice(sorted(nouns) if wanted else [n for n in (*SHAPES, "number") if n not in nouns])
    elif aspect == "colour":
        absent = [c for c in COLOUR_NAMES if c not in colours and c != scene.background]
        what = random.choice(sorted(colours) if wanted else absent) + " shape"
    else:
        noun, colour = random.choice(sorted(pairs)) if wanted else _absent_pair(random, scene)
        if not wanted and ((noun, colour) in pairs or (noun, colour) in UNSEEN_PAIRS):
            return None
        what = f"{colour} {noun}"
    text = _said(
        random,
        "Is there {x}?",
        "Is there {x} in the {p}?",
        "Do you see {x}?",
        "Can you see {x}?",
        "Does the {p} show {x}?",
        "Does the {p} have {x}?",
        x=with_article(what),
    )
    return text, f"Yes, there is {with_article(what)}." if wanted else f"No, there is no {what}."


def _absent_pair(random: Random, scene: Scene) -> tuple[str, str]:
    """Mostly one that shares a shape, a colour or both, in the wrong combination, with what is there."""
    noun, colour = random.choice(SHAPES), random.choice(COLOUR_NAMES)
    kind = random.random()
    if scene.things and kind < 0.7:
        noun = random.choice(scene.things).noun
    if scene.things and (kind > 0.85 or kind < 0.4):
        colour = random.choice(scene.things).colour
    return noun, colour


def _is_colour(random: Random, scene: Scene) -> tuple[str, str] | None:
    candidates = unique_nouns(scene)
    if not candidates:
        return None
    thing = random.choice(candidates)
    colour = thing.colour
    if random.random() < 0.5:
        near = [*(other.colour for other in scene.things), scene.background]
        colour = random.choice(near if random.random() < 0.6 else COLOUR_NAMES)
        if colour == thing.colour or (thing.kind, colour) in UNSEEN_PAIRS:
            return None
    text = _said(
        random,
        *["Is the {n} {c}?"] * 3,
        "Is the {n} in the {p} {c}?",
        "Is the {k} of the {n} {c}?",
        "Would you say the {n} is {c}?",
        n=thing.noun,
        c=colour,
    )
    return text, f"{'Yes' if colour == thing.colour else 'No'}, the {thing.noun} is {thing.colour}."


def _background(random: Random, scene: Scene) -> tuple[str, str] | None:
    if random.random() < 0.25:
        colour = scene.background
        if random.random() < 0.5:
            near = [thing.colour for thing in scene.things]
            colour = random.choice(near if near and random.random() < 0.5 else COLOUR_NAMES)
        verdict = "Yes" if colour == scene.background else "No"
        return _said(random, "Is the background {c}?", c=colour), f"{verdict}, the background is {scene.background}."
    text = _said(
        random,
        *["What {k} is the background?"] * 3,
        "Which {k} is the background?",
        "What is the {k} of the background?",
        "What is the background {k}?",
        "Tell me the {k} of the background.",
    )
    return text, f"The background is {scene.background}."


def _where(random: Random, scene: Scene) -> tuple[str, str] | None:
    if not scene.things:
        return None
    thing = random.choice(scene.things)
    name, place = _definite(random, scene, thing), place_of(thing)
    if name is None:
        return None
    if random.random() < 0.6:
        if place is None:
            return None
        text = _said(
            random,
            *["Where is the {n}?"] * 3,
            "Where is the {n} in the {p}?",
            "Where do you see the {n}?",
            "In which part of the {p} is the {n}?",
            n=name,
        )
        return text, f"The {name} is {place}."
    value, low, high, at = random.choice(((thing.x, "left", "right", "on the"), (thing.y, "top", "bottom", "at the")))
    side = _third(value, (low, "", high))
    if not side:
        return None
    first, second = (low, high) if random.random() < 0.7 else (high, low)
    return f"Is the {name} {at} {first} or {at} {second}?", f"The {name} is {at} {side}."


def _relation(random: Random, scene: Scene) -> tuple[str, str] | None:
    if len(scene.things) < 2:
        return None
    one, other = random.sample(scene.things, 2)
    name, other_name = _definite(random, scene, one), _definite(random, scene, other)
    difference, before, after = random.choice(
        ((one.x - other.x, "left of", "right of"), (one.y - other.y, "above", "below"))
    )
    if name is None or other_name is None or abs(difference) < _MIN_GAP:
        return None
    relation = before if difference < 0 else after
    kind = random.random()
    if kind < 0.45:
        asked = random.choice((before, after))
        verdict = "Yes" if asked == relation else "No"
        return f"Is the {name} {asked} the {other_name}?", f"{verdict}, the {name} is {relation} the {other_name}."
    if kind < 0.8 or len(scene.things) > 2:
        first, second = (before, after) if random.random() < 0.7 else (after, before)
        return f"Is the {name} {first} or {second} the {other_name}?", f"The {name} is {relation} the {other_name}."
    text = random.choice((f"What is {relation} the {other_name}?", f"Which shape is {relation} the {other_name}?"))
    return text, f"{_capital(phrase(one))} is {relation} the {other_name}."


def _extreme(random: Random, scene: Scene) -> tuple[str, str] | None:
    if len(scene.things) < 2:
        return None
    axis, sign, side, at = random.choice(
        (
            ("x", 1, "left", "on the"),
            ("x", -1, "right", "on the"),
            ("y", 1, "top", "at the"),
            ("y", -1, "bottom", "at the"),
        )
    )
    first, second, *_ = sorted(scene.things, key=lambda thing: sign * getattr(thing, axis))
    if abs(getattr(first, axis) - getattr(second, axis)) < _MIN_GAP:
        return None
    forms = [f"Which shape is {at} {side}?", f"What is {at} {side}?"]
    if len(scene.things) > 2:
        forms = [f"What is the {side}most shape?", f"Which shape is closest to the {side}?"]
    return random.choice(forms), f"{_capital(phrase(first))}."


def _size(random: Random, scene: Scene) -> tuple[str, str] | None:
    if len(scene.things) < 2 or any(thing.kind in DIGITS for thing in scene.things):
        return None
    asks_large = random.random() < 0.5
    if random.random() < 0.6:
        one, other = random.sample(scene.things, 2)
        name, other_name = _definite(random, scene, one), _definite(random, scene, other)
        if name is None or other_name is None or _ratio(one, other) < _MIN_SIZE_RATIO:
            return None
        word = random.choice(("bigger", "larger")) if asks_large else "smaller"
        is_larger = one.size > other.size
        if random.random() < 0.6:
            winner = name if is_larger == asks_large else other_name
            return f"Which is {word}, the {name} or the {other_name}?", f"The {winner} is {word}."
        verdict = "Yes" if is_larger == asks_large else "No"
        truth = ("larger" if word == "smaller" else word) if is_larger else "smaller"
        return f"Is the {name} {word} than the {other_name}?", f"{verdict}, the {name} is {truth}."
    first, second, *rest = sorted(scene.things, key=lambda thing: -thing.size if asks_large else thing.size)
    if _ratio(first, second) < _MIN_SIZE_RATIO:
        return None
    many = random.choice(("biggest", "largest")) if asks_large else "smallest"
    two = random.choice(("bigger", "larger")) if asks_large else "smaller"
    word = many if rest else two
    return random.choice((f"Which shape is {word}?", f"What is the {word} shape?")), f"{_capital(phrase(first))}."


def _ratio(one: Thing, other: Thing) -> float:
    return max(one.size, other.size) / min(one.size, other.size)


def _describe(random: Random, scene: Scene) -> tuple[str, str] | None:
    columns = sorted(thing.x for thing in scene.things)
    if any(right - left < _MIN_ORDER_GAP for left, right in pairwise(columns)):
        return None
    text = _said(
        random,
        *["Describe the {p}."] * 3,
        "What is in the {p}?",
        "What is in this {p}?",
        "What do you see?",
        "Describe what you see.",
        "What does the {p} show?",
        "Can you describe the {p}?",
        "Tell me what is in the {p}.",
    )
    return text, description(scene)


def _digit(random: Random, scene: Scene) -> tuple[str, str] | None:
    digits = [thing for thing in scene.things if thing.kind in DIGITS]
    if not digits and random.random() > 0.1:
        return None
    text = _said(
        random,
        "What number is in the {p}?",
        "Which number do you see?",
        "What number is shown?",
        "Which digit is in the {p}?",
        "What digit do you see?",
        "Read the number.",
    )
    return text, f"The number is {digits[0].kind}." if digits else "There is no number."


_ASKERS: dict[str, Asker] = {
    "colour": _colour,
    "shape": _shape,
    "count": _count,
    "count by colour": _count_colour,
    "count by shape": _count_shape,
    "yes/no: is there": _exists,
    "yes/no: is it": _is_colour,
    "background": _background,
    "where": _where,
    "relation": _relation,
    "extreme": _extreme,
    "size": _size,
    "description": _describe,
    "digit": _digit,
}
KINDS_OF_QUESTION = tuple(_ASKERS)
# What is harder to learn is asked more often.
_WEIGHTS = (3.0, 3.0, 1.5, 2.5, 2.5, 4.0, 2.5, 1.5, 6.0, 8.0, 5.0, 7.0, 5.0, 3.0)
