"""JSON in one order: what means the same is rendered the same, and so finds the same cached prefix.

Objects are unordered, and clients write them as their language happens to. Here their keys are sorted (by UTF-8), at
every depth. Lists keep their order, which means something. Numbers stay what they are: 1 does not become 1.0, integers
of any size keep their digits, fractions are doubles as everywhere. Of a key that occurs twice the last one counts, as
with every parser in use. Escapes are undone; Unicode is not normalised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from .errors import PromptError


@dataclass(frozen=True, slots=True)
class JsonText:
    """JSON as a client wrote it, and the name of the field it wrote it in."""

    text: str | bytes
    field: str


def canonical_object(json: JsonText) -> dict[str, Any]:
    """The object that `json` holds, in canonical order. Raises PromptError naming the field if it holds none."""
    try:
        value = msgspec.json.decode(json.text)
        if not isinstance(value, dict):
            raise PromptError(f"{json.field} must hold a JSON object, got {_kind(value)}", json.field)
        return msgspec.json.decode(msgspec.json.encode(value, order="deterministic"))
    except RecursionError as error:
        raise PromptError(f"{json.field} is nested too deeply", json.field) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PromptError(f"{json.field} is not valid JSON: {error}", json.field) from error


def _kind(value: object) -> str:
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "an array"}
    return "null" if value is None else kinds[type(value)]
