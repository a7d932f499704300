"""Chats around pictures: several questions, follow-ups, two pictures, none at all, and small talk."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from .questions import PICTURES, Question, ask, casual, place_of, unique_nouns, with_article
from .scenes import COLOUR_NAMES, SHAPES, UNSEEN_PAIRS, Scene

ORDINALS = ("first", "second")

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant that answers questions about pictures.",
    "Answer briefly.",
    "You look at pictures of shapes.",
)
REFUSAL = "I can only talk about simple shapes in pictures."
NO_PICTURE = "I do not see a picture. Please send me one."

_SMALL_TALK = (
    (
        ("Hello", "Hi", "Hi there!", "Hello!", "Hey", "Good morning", "Good evening"),
        "Hello! Show me a picture of simple shapes.",
    ),
    (
        ("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Are you a robot?"),
        "I am Foreword's small demo model. I look at simple shapes.",
    ),
    (
        ("What can you do?", "Help", "How can you help me?", "How does this work?", "What should I do?"),
        "I answer questions about shapes, colours and numbers in a picture.",
    ),
    (("How are you?", "How are you doing?", "How is it going?"), "I am fine, thank you."),
    (("Thanks", "Thank you!", "Thank you very much.", "Great, thanks!", "Well done."), "You are welcome!"),
    (("Bye", "Goodbye", "See you later.", "Good night"), "Goodbye!"),
    (
        ("What shapes do you know?", "Which shapes can you see?"),
        "I know circles, squares, triangles, stars, crosses, hearts and numbers.",
    ),
    (
        ("What colours do you know?", "Which colors do you know?"),
        "I know red, green, blue, yellow, orange, purple, black and white.",
    ),
)
_TOPICS = tuple(
    "France|Japan|Brazil|football|music|history|physics|the weather|love|money|food|dogs|cats|computers|Python|the moon"
    "|the sun|trees|cars|trains|school|work|politics|chess|cooking|pizza|coffee|the sea|birds|horses|books|films|art"
    "|London|Paris|winter|happiness|life|banks|law|medicine|my mother|my boss|a holiday|the internet|robots".split("|")
)
_OFF_TOPIC = (
    "What is the capital of {t}?",
    "Write a poem about {t}.",
    "Tell me a joke about {t}.",
    "Who invented {t}?",
    "What do you think about {t}?",
    "Explain {t} to me.",
    "Write a story about {t}.",
    "How do I learn about {t}?",
    "What is {t}?",
    "Do you like {t}?",
    "Why is {t} important?",
    "What is {a} plus {b}?",
    "Calculate {a} times {b}.",
    "What time is it?",
    "Tell me a joke.",
    "Write an email to {t}.",
    "Write a program.",
    "Where is {t}?",
    "Tell me about {t}.",
    "Let us talk about {t}.",
    "I love {t}.",
    "{t}",
)


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user says, after the pictures `scenes`, and what is answered."""

    question: Question
    scenes: tuple[Scene, ...] = ()


def ask_about_two(random: Random, scenes: tuple[Scene, Scene]) -> Question:
    """Which of two pictures shows something, or a question about the first or the second of them."""
    return _which(random, scenes) if random.random() < 0.45 else _about_one_of_two(random, scenes)


def _which(random: Random, scenes: tuple[Scene, Scene]) -> Question:
    while True:
        source = random.choice(scenes)
        aspect = random.choices(("pair", "noun", "colour", "background"), (2, 3, 2, 1))[0]
        noun, colour = random.choice(SHAPES), random.choice(COLOUR_NAMES)
        if source.things and random.random() < 0.85:
            thing = random.choice(source.things)
            noun, colour = thing.noun, thing.colour
        if aspect == "background":
            what = f"{source.background} background"
            shown = [scene.background == source.background for scene in scenes]
        elif aspect == "noun":
            what = noun
            shown = [any(thing.noun == noun for thing in scene.things) for scene in scenes]
        elif aspect == "colour":
            what = f"{colour} shape"
            shown = [any(thing.colour == colour for thing in scene.things) for scene in scenes]
        else:
            if (noun, colour) in UNSEEN_PAIRS:
                continue
            what = f"{colour} {noun}"
            shown = [any((t.noun, t.colour) == (noun, colour) for t in scene.things) for scene in scenes]
        # One of the two is by far the usual answer, and the one that needs looking at both.
        if sum(shown) != 1 and random.random() < 0.7:
            continue
        picture = random.choice(("picture", "picture", "image"))
        form = random.choice(
            ("Which {p} has {x}?", "Which {p} shows {x}?", "In which {p} is there {x}?", "Which of the {p}s has {x}?")
        )
        if sum(shown) == 1:
            answer = f"The {ORDINALS[shown.index(True)]} picture."
        else:
            answer = "Both pictures." if all(shown) else "Neither picture."
        return Question("which of two", casual(random, form.format(p=picture, x=with_article(what))), answer)


def _about_one_of_two(random: Random, scenes: tuple[Scene, Scene]) -> Question:
    index = random.randrange(2)
    named = f"the {ORDINALS[index]} {random.choice(('picture', 'picture', 'image'))}"
    while True:
        kind = random.choices(("colour", "shape", "count", "background", "description", "digit"), (4, 4, 3, 2, 2, 1))[0]
        try:
            question = ask(random, scenes[index], kind)
        except LookupError:
            continue
        text = _in_picture(question.text, named)
        if text is not None:
            return Question(f"one of two: {kind}", text, question.answer)


def _in_picture(text: str, named: str) -> str | None:
    """`text`, about the picture that is `named`; None where that would be no English."""
    for word in set(PICTURES):
        for pointer in (f"the {word}", f"this {word}"):
            if pointer in text:
                return text.replace(pointer, named)
    if text.endswith((" it?", " this?", " see?", " see.", " it", " this", " see", "this shape?", "this shape")):
        return None
    end = text[-1] if text[-1] in "?." else ""
    return f"{text.rstrip('?.')} in {named}{end}"


def follow_up(random: Random, scene: Scene, before: Question) -> Question | None:
    """A short second question that means something only after `before`."""
    things = unique_nouns(scene)
    about = next((thing for thing in things if f"he {thing.noun} is {thing.colour}" in before.answer), None)
    if before.kind == "yes/no: is there" and before.answer.startswith("Yes"):
        about = next(
            (
                thing
                for thing in things
                if before.answer.endswith((f"a {thing.noun}.", f"{thing.colour} {thing.noun}."))
            ),
            None,
        )
        if about is not None and random.random() < 0.5:
            return Question(
                "follow-up",
                random.choice(("What colour is it?", "What color is it?", "And what colour is it?")),
                f"The {about.noun} is {about.colour}.",
            )
    if about is None:
        return None
    others = [thing for thing in things if thing is not about]
    if before.kind == "colour" and others and random.random() < 0.5:
        other = random.choice(others)
        return Question(
            "follow-up",
            random.choice((f"And the {other.noun}?", f"What about the {other.noun}?")),
            f"The {other.noun} is {other.colour}.",
        )
    if (place := place_of(about)) is not None:
        return Question(
            "follow-up", random.choice(("Where is it?", "And where is it?")), f"The {about.noun} is {place}."
        )
    return Question(
        "follow-up",
        random.choice(("And the background?", "What about the background?")),
        f"The background is {scene.background}.",
    )


def talk(random: Random, scene: Scene) -> Question:
    """What is said before there is a picture: small talk, other topics, and questions about one all the same."""
    if random.random() < 0.75:
        return about_no_picture(random)
    return Question("no picture", ask(random, scene).text, NO_PICTURE)


def about_no_picture(random: Random) -> Question:
    """Small talk, and other topics."""
    if random.random() < 0.53:
        texts, answer = random.choice(_SMALL_TALK)
        return Question("small talk", casual(random, random.choice(texts)), answer)
    text = random.choice(_OFF_TOPIC).format(t=random.choice(_TOPICS), a=random.randrange(100), b=random.randrange(100))
    return Question("other topics", casual(random, text), REFUSAL)
