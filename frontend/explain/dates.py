"""Is what differs a date, or a time of day?"""

from __future__ import annotations

import re

_DAY = r"(?:mon(?:day)?|tue(?:s(?:day)?)?|wed(?:nesday)?|thu(?:r(?:s(?:day)?)?)?|fri(?:day)?|sat(?:urday)?|sun(?:day)?)"
_MONTH = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?)"
)
_CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d{1,9})?)?(?:\s?[ap]\.?m\.?)?(?:\s?(?:z|utc|gmt|[+-]\d{2}:?\d{2}))?"
_ISO = r"\d{4}-\d{2}-\d{2}"
_NUMERIC = r"\d{1,4}[/.]\d{1,2}[/.]\d{1,4}"
_DAY_FIRST = rf"\d{{1,2}}(?:st|nd|rd|th)?\.?\s+(?:of\s+)?{_MONTH}(?:\.?,?\s+\d{{4}})?"
_MONTH_FIRST = rf"{_MONTH}\.?\s+\d{{1,2}}(?:st|nd|rd|th)?(?:,?\s+(?:{_CLOCK}\s+)?\d{{4}})?"
_UNIX = r"1\d{9}(?:\d{3})?(?:\.\d{1,6})?"
_DATE = rf"(?:{_ISO}|{_NUMERIC}|{_DAY_FIRST}|{_MONTH_FIRST})"
_MOMENT = re.compile(
    rf"(?<![\w.])(?:(?:{_DAY}\.?,?\s+)?{_DATE}(?:(?:,|t|\sat)?\s?{_CLOCK})?|{_DAY}\b|{_CLOCK}|{_UNIX})(?![\w])",
    re.IGNORECASE,
)


def are_dates(before: str, one: str, other: str) -> bool:
    """Whether `before + one` and `before + other` have a date or a time each where they part, and at the same place."""
    place = len(before) + _num_common(one, other)
    first, second = _moment_at(before + one, place), _moment_at(before + other, place)
    return first is not None and second is not None and first.start() == second.start() and first[0] != second[0]


def _moment_at(text: str, place: int) -> re.Match[str] | None:
    """One that begins at `place` or before it, and goes on behind it or ends there."""
    return next((found for found in _MOMENT.finditer(text) if found.start() <= place <= found.end()), None)


def _num_common(one: str, other: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
