"""The table of accuracies: in the terminal, and in the model card."""

from __future__ import annotations

from pathlib import Path

from .evaluation import Score
from .questions import KINDS_OF_QUESTION

_BEGIN, _ADAPTER_BEGIN, _END = "<!-- accuracy -->", "<!-- accuracy with the adapter -->", "<!-- end -->"

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
ADAPTER_HEAD = ("questions about", "asked", "right without", "right with it")


def table_rows(scores: dict[str, Score]) -> list[tuple[str, str, str, str]]:
    """One for each kind, under `HEAD`; of a goal that was missed it says so."""
    return [
        (kind, f"{_share(score):.1%}", str(score.asked), _goal(kind, score))
        for kind, score in sorted(scores.items(), key=lambda item: _place(item[0]))
    ]


def write_into_card(card: Path, scores: dict[str, Score]) -> None:
    """Put the table between the card's markers. Raises ValueError if it has none."""
    _write(card, _BEGIN, [HEAD, ("---", "---:", "---:", "---"), *table_rows(scores)])


def adapter_rows(plain: dict[str, Score], adapted: dict[str, Score]) -> list[tuple[str, str, str, str]]:
    """One for each group of questions, under `ADAPTER_HEAD`."""
    return [
        (name, str(alone.asked), f"{_share(alone):.1%}", f"{_share(_sum(adapted, kinds)):.1%}")
        for name, kinds in _groups(plain).items()
        for alone in (_sum(plain, kinds),)
    ]


def write_adapter_into_card(card: Path, plain: dict[str, Score], adapted: dict[str, Score]) -> None:
    """Put the adapter's table between its markers. Raises ValueError if the card has none."""
    _write(card, _ADAPTER_BEGIN, [ADAPTER_HEAD, ("---", "---:", "---:", "---:"), *adapter_rows(plain, adapted)])


def _write(card: Path, marker: str, lines: list[tuple[str, ...]]) -> None:
    text = card.read_text()
    before, begin, rest = text.partition(marker)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{card} has no {marker} and {_END} to write between")
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    card.write_text(f"{before}{begin}\n{table}\n{end}{after}")


def _groups(scores: dict[str, Score]) -> dict[str, list[str]]:
    """Kinds of questions by what they are about."""
    groups: dict[str, list[str]] = {}
    for kind in scores:
        if kind in KINDS_OF_QUESTION or kind == "follow-up":
            name = "one picture"
        elif "of two" in kind:
            name = "two pictures"
        else:
            name = "an unseen pair" if kind.startswith("unseen pair") else "small talk, other topics, no picture"
        groups.setdefault(name, []).append(kind)
    return groups


def _sum(scores: dict[str, Score], kinds: list[str]) -> Score:
    return Score(sum(scores[kind].asked for kind in kinds), sum(scores[kind].right for kind in kinds))


def _place(kind: str) -> tuple[int, str]:
    section = kind if kind in KINDS_OF_QUESTION else kind.partition(":")[0]
    return (_SECTIONS.index(section) if section in _SECTIONS else len(_SECTIONS)), kind


def _goal(kind: str, score: Score) -> str:
    if (goal := GOALS.get(kind)) is None:
        return ""
    return f"{goal:.0%}" if _share(score) >= goal else f"{goal:.0%}, **missed**"


def _share(score: Score) -> float:
    return score.right / score.asked
