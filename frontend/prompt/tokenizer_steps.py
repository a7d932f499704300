"""What a tokenizer says of its own parts."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer


def steps(component: Any, key: str) -> list[dict[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or post-processor, as in `tokenizer.json`, nested ones laid out flat.

    `key` is where a sequence of this kind keeps its steps. None has no steps; a part written in Python is one of the
    type `Custom`.
    """
    if component is None:
        return []
    try:
        state = component.__getstate__()
    except Exception:  # as tokenizers raises it
        return [{"type": "Custom"}]
    return _flat(json.loads(state), key)


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether its vocabulary spells bytes, one character for each."""
    return any(split["type"] == "ByteLevel" for split in steps(tokenizer.pre_tokenizer, "pretokenizers"))


def _flat(state: dict[str, Any], key: str) -> list[dict[str, Any]]:
    if state["type"] != "Sequence":
        return [state]
    return [step for nested in state[key] for step in _flat(nested, key)]
