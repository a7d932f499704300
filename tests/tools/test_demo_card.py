"""The accuracy in the model card is what was measured, and says which goals were missed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.wire_peers import ROOT
from tools.demo_vlm.card import GOALS, write_into_card
from tools.demo_vlm.evaluation import Score, held_out_cases, unseen_pair_cases
from tools.demo_vlm.training import draw_pictures

SCORES = {"small talk": Score(10, 10), "where": Score(200, 169), "colour": Score(100, 97)}


def test_the_table_replaces_the_one_before(tmp_path: Path):
    card = tmp_path / "card.md"
    card.write_text("before\n<!-- accuracy -->\n| old |\n<!-- end -->\nafter\n")
    for _ in range(2):
        write_into_card(card, SCORES)
    before, *table, after = card.read_text().splitlines()
    assert (before, after) == ("before", "after")
    assert table[3:-1] == [
        "| colour | 97.0% | 100 | 97% |",
        "| where | 84.5% | 200 | 85%, **missed** |",
        "| small talk | 100.0% | 10 |  |",
    ]


def test_a_page_without_a_place_for_it_is_left_alone(tmp_path: Path):
    card = tmp_path / "card.md"
    card.write_text("<!-- accuracy -->\n")
    with pytest.raises(ValueError, match=r"card\.md has no"):
        write_into_card(card, SCORES)
    assert card.read_text() == "<!-- accuracy -->\n"


def test_every_goal_is_measured_and_in_the_card():
    pictures = draw_pictures(200, 5, lambda: None)
    unseen = draw_pictures(100, 6, lambda: None, with_unseen_pair=True)
    kinds = {case.kind for case in (*held_out_cases(pictures, 60), *unseen_pair_cases(unseen, 10))}
    assert kinds >= GOALS.keys()
    card = (ROOT / "docs" / "demo_model.md").read_text()
    assert all(f"\n| {kind} | " in card for kind in GOALS)
