"""Sizes in bytes as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]?i?)b?\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """`2GiB`, `500MB`, `1.5g` or plain bytes → bytes. Units with an i are powers of 1024. Raises ValueError."""
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write for instance 2GiB, 500MB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2].lower()])
