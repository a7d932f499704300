"""The table of accuracies: in the terminal, and in the model card."""

from __future__ import annotations

from pathlib import Path

from .evaluation import Score
from .questions import KINDS_OF_QUESTION

_BEGIN, _END = "<!-- accuracy -->", "<!-- end -->"

# What was set out to be reached, as a share of the answers; kinds that are not here had no goal.
GOALS = (
    dict.fromkeys(("colour", "shape", "count", "digit", "background"), 0.97)
    | dict.fromkeys(("count by colour", "count by shape", "yes/no: is there", "yes/no: is it", "description"), 0.92)
    | dict.fromkeys(("one of two: colour", "one of two: shape", "one of two: count"), 0.92)
    | dict.fromkeys(("unseen pair: colour", "unseen pair: shape"), 0.90)
    | dict.fromkeys(("where", "relation", "size", "extreme", "which of two"), 0.85)
)
_SECTIONS = (*KINDS_OF_QUESTION, "follow-up", "which of two", "one of two", "unseen pair")
HEAD = ("kind of question", "right", "asked", "goal")


def table_rows(scores: dict[str, Score]) -> list[tuple[str, str, str, str]]:
    """One for each kind, under `HEAD`; of a goal that was missed it says so."""
    return [
        (kind, f"{_share(score):.1%}", str(score.asked), _goal(kind, score))
        for kind, score in sorted(scores.items(), key=lambda item: _place(item[0]))
    ]


def write_into_card(card: Path, scores: dict[str, Score]) -> None:
    """Put the table between the card's markers. Raises ValueError if it has none."""
    text = card.read_text()
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{card} has no {_BEGIN} and {_END} to write between")
    lines = [HEAD, ("---", "---:", "---:", "---"), *table_rows(scores)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    card.write_text(f"{before}{begin}\n{table}\n{end}{after}")


def _place(kind: str) -> tuple[int, str]:
    section = kind if kind in KINDS_OF_QUESTION else kind.partition(":")[0]
    return (_SECTIONS.index(section) if section in _SECTIONS else len(_SECTIONS)), kind


def _goal(kind: str, score: Score) -> str:
    if (goal := GOALS.get(kind)) is None:
        return ""
    return f"{goal:.0%}" if _share(score) >= goal else f"{goal:.0%}, **missed**"


def _share(score: Score) -> float:
    return score.right / score.asked
