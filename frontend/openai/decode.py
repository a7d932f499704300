"""A request's body → a typed request, in one pass, with errors that name the field as the client wrote it."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from frontend.errors import ApiError, invalid_request

T = TypeVar("T")

_LOCATED = re.compile(r"(?P<problem>.*?)(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)
_FIELD = re.compile(r"Object (?P<what>missing required|contains unknown) field `(?P<field>.*)`", re.DOTALL)


def decode_body(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode and validate `body`. Raises ApiError (400) naming the field at fault."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid_request(f"the body is not valid JSON: {error}", None, "invalid_json") from None


def _invalid(message: str) -> ApiError:
    located = _LOCATED.fullmatch(message)
    assert located is not None
    problem, path = located["problem"], located["path"] or ""
    field = _FIELD.fullmatch(problem)
    if field is None:
        return invalid_request(f"invalid value for '{path}': {problem}" if path else problem, path or None)
    param = f"{path}.{field['field']}" if path else field["field"]
    if field["what"] == "missing required":
        return invalid_request(f"missing required parameter '{param}'", param, "missing_required_parameter")
    return invalid_request(f"unrecognized parameter '{param}'", param, "unknown_parameter")
