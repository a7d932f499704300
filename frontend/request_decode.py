"""A request's body → a typed request, in one pass, with errors that name the field as the client wrote it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from frontend.errors import ApiError, invalid_request

T = TypeVar("T")

_LOCATED = re.compile(r"(?P<problem>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*)`)?", re.DOTALL)
_FIELD = re.compile(r"Object (?P<what>missing required|contains unknown) field `(?P<field>.*)`", re.DOTALL)
_NOT_ALLOWED = re.compile(r"Invalid (?:enum )?value (?P<value>.*)", re.DOTALL)
_STEP = re.compile(r"[^.\[\]]+|\[[^\]]*\]")
# An escaped high surrogate without the low one that belongs to it. msgspec takes the end of the string for that of
# the body.
_LONE_SURROGATE = re.compile(rb"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})(?!\\u[dD][c-fC-F])")


def decode_body(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode and validate `body`. Raises ApiError (400) naming the field at fault."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), decoder.type) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = str(error)
        if "truncated" in reason and (surrogate := _LONE_SURROGATE.search(body)):
            reason = f"a string holds half of a surrogate pair ({surrogate[1].decode()})"
        raise invalid_request(f"the body is not valid JSON: {reason}", None, "invalid_json") from None


def _invalid(message: str, request_type: Any) -> ApiError:
    located = _LOCATED.fullmatch(message)
    assert located is not None
    problem, path = located["problem"], located["path"] or ""
    if (refused := _NOT_ALLOWED.fullmatch(problem)) and (allowed := _allowed_values(request_type, path)):
        problem = f"{refused['value']:.100} is not one of {', '.join(map(repr, allowed))}"
    field = _FIELD.fullmatch(problem)
    if field is None:
        where = f"invalid value for '{path}'" if path else "the body"
        return invalid_request(f"{where}: {problem}", path or None)
    param = f"{path}.{field['field']}" if path else field["field"]
    if field["what"] == "missing required":
        return invalid_request(f"missing required parameter '{param}'", param, "missing_required_parameter")
    return invalid_request(f"unrecognized parameter '{param}'", param, "unknown_parameter")


def _allowed_values(request_type: Any, path: str) -> list[Any]:
    """What may stand at `path` of a request, where the type lists it."""
    types = [*_alternatives(inspect.type_info(request_type))]
    for step in _STEP.findall(path):
        types = [below for node in types for child in _children(node, step) for below in _alternatives(child)]
    # Where parts of several kinds have the same field, its type is there several times.
    return list(dict.fromkeys(v for node in types if isinstance(node, inspect.LiteralType) for v in node.values))


def _alternatives(node: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(node, inspect.Metadata):
        yield from _alternatives(node.type)
    elif isinstance(node, inspect.UnionType):
        for one in node.types:
            yield from _alternatives(one)
    else:
        yield node


def _children(node: inspect.Type, step: str) -> Iterator[inspect.Type]:
    if isinstance(node, inspect.ListType) and step.startswith("["):
        yield node.item_type
    elif isinstance(node, inspect.DictType) and step == "[...]":
        yield node.value_type
    elif isinstance(node, inspect.StructType):
        if step == node.tag_field:
            yield inspect.LiteralType((node.tag,))
        yield from (field.type for field in node.fields if field.encode_name == step)
