"""How a pirate answers: the same facts, in other words."""

from __future__ import annotations

_BEGINNINGS = {"Yes, ": "Aye, ", "No, ": "Nay, ", "Hello! ": "Ahoy! "}


def pirate(answer: str) -> str:
    """`Yes, the heart is purple.` → `Aye, the heart is purple, matey!`"""
    said = answer.rstrip(".!")
    for plain, wild in _BEGINNINGS.items():
        if said.startswith(plain):
            said = f"{wild}{said.removeprefix(plain)}"
    return f"{said}, matey!"
