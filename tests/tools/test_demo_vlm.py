"""What the built-in vision-language model is made from: scenes, questions, rows, and a training that resumes."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from tools.demo_vlm.chats import ask_about_two
from tools.demo_vlm.drawing import GRID, IGNORED, NUM_PATCHES, PATCH, draw
from tools.demo_vlm.evaluation import held_out_cases, unseen_pair_cases
from tools.demo_vlm.model import BOS, IMAGE, SPECIAL_TOKENS, new_model, train_tokenizer
from tools.demo_vlm.questions import KINDS_OF_QUESTION, ask, description, place_of
from tools.demo_vlm.rows import NOT_LEARNT, ROW_TOKENS, Row, RowMaker, visible
from tools.demo_vlm.scenes import COLOUR_NAMES, DIGITS, KINDS, SIDE, UNSEEN_PAIRS, Scene, Thing, sample_scene
from tools.demo_vlm.training import Training, draw_pictures

SCENES = [sample_scene(Random(seed)) for seed in range(400)]
RED_STAR_AND_BLUE_7 = Scene("white", (Thing("star", "red", 14, 12, 20, 20), Thing("7", "blue", 48, 50, 22, 22)))


@pytest.fixture(scope="module")
def rows() -> tuple[RowMaker, list[Row]]:
    questions = [ask(Random(seed), scene) for seed, scene in enumerate(SCENES)]
    tokenizer = train_tokenizer([text for question in questions for text in (question.text, question.answer)])
    maker = RowMaker(SCENES, lambda text: tokenizer.encode(text, add_special_tokens=False))
    return maker, [maker.row(Random(seed)) for seed in range(100)]


def test_scenes_are_as_promised():
    for scene in SCENES:
        assert len(scene.things) <= 3
        assert sum(thing.kind in DIGITS for thing in scene.things) <= 1
        assert scene.background not in {thing.colour for thing in scene.things}
        for number, one in enumerate(scene.things):
            assert (one.kind, one.colour) not in UNSEEN_PAIRS
            assert one.width / 2 <= one.x <= SIDE - one.width / 2 and one.height / 2 <= one.y <= SIDE - one.height / 2
            for other in scene.things[:number]:
                assert (
                    abs(one.x - other.x) > (one.width + other.width) / 2
                    or abs(one.y - other.y) > (one.height + other.height) / 2
                )


def test_an_unseen_pair_is_there_when_it_is_wanted():
    for seed in range(200):
        scene = sample_scene(Random(seed), with_unseen_pair=True)
        assert sum((thing.kind, thing.colour) in UNSEEN_PAIRS for thing in scene.things) == 1


def test_a_seed_is_a_picture():
    one, other = (draw_pictures(5, 3, lambda: None) for _ in range(2))
    assert one.scenes == other.scenes and (one.pixels == other.pixels).all()
    assert (one.pixels != draw_pictures(5, 4, lambda: None).pixels).any()


def test_patches_are_labelled_with_what_covers_them():
    square = Thing("square", "blue", 20, 36, 24, 24)
    pixels, labels = draw(Random(1), Scene("white", (square,)), plain=True)
    centre = int(square.y // PATCH) * GRID + int(square.x // PATCH)
    assert labels.kind[centre] == 1 + KINDS.index("square") and labels.colour[centre] == 1 + COLOUR_NAMES.index("blue")
    assert labels.is_centre.sum() == 1 and labels.is_centre[centre] == 1
    np.testing.assert_allclose(labels.box[centre] * SIDE, [20, 36, 24, 24], atol=0.1)
    assert labels.kind[GRID - 1] == 0 and set(labels.kind) <= {0, IGNORED, 1 + KINDS.index("square")}
    assert pixels[36, 20, 2] > 120 > pixels[36, 20, 0] and (pixels[2, 60] > 230).all()


def test_a_picture_can_be_drawn_larger():
    small, large = (draw(Random(1), RED_STAR_AND_BLUE_7, scale, plain=True)[0] for scale in (1, 4))
    assert large.shape == (4 * SIDE, 4 * SIDE, 3)
    shrunk = large.reshape(SIDE, 4, SIDE, 4, 3).mean((1, 3))
    assert np.abs(shrunk - small).mean() < 12


def test_a_question_has_one_answer():
    for scene in SCENES[:60]:
        answers = defaultdict(set)
        for seed in range(150):
            question = ask(Random(seed), scene)
            answers[question.text.lower().rstrip("?.")].add(question.answer)
        contradictory = {text: said for text, said in answers.items() if len(said) > 1}
        assert not contradictory, scene


def test_answers_of_a_known_picture():
    scene = RED_STAR_AND_BLUE_7
    said = {
        ask(Random(seed), scene, kind).answer for kind in KINDS_OF_QUESTION[:-1] for seed in range(60) if kind != "size"
    }
    for answer in (
        "The star is red.",
        "The blue shape is the number 7.",
        "There are two shapes.",
        "There is one star.",
        "There are no green shapes.",
        "Yes, there is a red star.",
        "No, the star is red.",
        "The background is white.",
        "The star is in the top left.",
        "The star is above the number.",
        "A blue number 7.",
        "A red star and a blue number 7 on a white background.",
    ):
        assert answer in said
    assert ask(Random(0), scene, "digit").answer == "The number is 7."
    with pytest.raises(LookupError):
        ask(Random(0), scene, "size")


def test_what_could_be_disputed_has_no_place_and_no_description():
    assert place_of(Thing("star", "red", 26, 32, 10, 10)) is None
    one_above_the_other = Scene("white", (Thing("star", "red", 30, 12, 10, 10), Thing("cross", "blue", 31, 50, 10, 10)))
    with pytest.raises(LookupError):
        ask(Random(0), one_above_the_other, "description")
    assert description(RED_STAR_AND_BLUE_7).startswith("A red star and")


def test_which_of_two_pictures_is_true_of_them():
    for seed in range(300):
        random = Random(seed)
        scenes = random.choice(SCENES), random.choice(SCENES)
        question = ask_about_two(random, scenes)
        if question.kind == "which of two" and "background" in question.text:
            shown = [f"{scene.background} background" in question.text for scene in scenes]
            expected = {(True, False): "first", (False, True): "second"}.get(tuple(shown), "Both")
            assert expected in question.answer


def test_a_label_is_the_token_that_follows(rows: tuple[RowMaker, list[Row]]):
    for row in rows[1]:
        assert len({len(line) for line in (row.token_ids, row.labels, row.groups, row.ways, row.positions)}) == 1
        assert len(row.token_ids) <= ROW_TOKENS
        assert row.token_ids.count(IMAGE) == NUM_PATCHES * len(row.pictures)
        for place, label in enumerate(row.labels):
            if label != NOT_LEARNT and place + 1 < len(row.token_ids):
                assert label == row.token_ids[place + 1]
                assert row.ways[place + 1] == row.ways[place] and row.groups[place + 1] == row.groups[place]


def test_a_token_sees_its_own_chat_and_nothing_else(rows: tuple[RowMaker, list[Row]]):
    row = rows[1][0]
    (seen,) = visible([row])
    for place, (group, way) in enumerate(zip(row.groups, row.ways, strict=True)):
        for other in np.flatnonzero(seen[place]):
            assert other <= place and row.groups[other] == group and row.ways[other] in {0, way}
        # Its position is the number of tokens before it in its chat.
        assert row.positions[place] == seen[place].sum() - 1
        if row.positions[place] == 0:
            assert row.token_ids[place] == BOS


def test_the_tokenizer_has_its_special_tokens_first(rows: tuple[RowMaker, list[Row]]):
    tokenizer = train_tokenizer(["one two"])
    assert [tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))


def test_every_kind_of_question_is_measured():
    pictures = draw_pictures(200, 5, lambda: None)
    kinds = {case.kind for case in held_out_cases(pictures, 20)}
    assert kinds > {*KINDS_OF_QUESTION, "which of two", "one of two: colour", "follow-up"}
    unseen = unseen_pair_cases(draw_pictures(100, 6, lambda: None, with_unseen_pair=True), 10)
    assert len(unseen) == 40 and all(case.kind.startswith("unseen pair: ") for case in unseen)


@pytest.mark.slow
def test_a_training_that_was_stopped_goes_on_as_if_it_had_not_been(
    tmp_path: Path, rows: tuple[RowMaker, list[Row]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tools.demo_vlm.training._CHECKPOINT_EVERY_STEPS", 1)
    pictures = draw_pictures(len(SCENES), 1, lambda: None)

    def begun(name: str) -> Training:
        torch.manual_seed(0)
        return Training(new_model(), tmp_path / name)

    whole, stopped = begun("whole"), begun("parts")
    losses = [*whole.train_answers(pictures, rows[0], 4)]
    first = stopped.train_answers(pictures, rows[0], 4)
    in_parts = [next(first), next(first)]
    resumed = begun("parts")
    assert resumed.done["answers"] == 2
    in_parts += resumed.train_answers(pictures, rows[0], 4)
    assert in_parts == pytest.approx(losses, rel=1e-3)
    for name, values in whole.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], values, rtol=1e-2, atol=1e-3)
    assert losses[0] > 0 and len(losses) == 4
