"""Chat templates as programs: Jinja, with what the templates of transformers' models expect to find in it.

They come with the model, so they run in Jinja's sandbox, and all they are handed is plain JSON data.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _GenerationBlocks(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the model says, for training. Here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - so the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def compile_template(source: str) -> Template:
    """Raises jinja2.TemplateSyntaxError."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlocks]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment.from_string(source)


def midnight(now: datetime) -> datetime:
    """The beginning of `now`'s day."""
    return now.replace(hour=0, minute=0, second=0, microsecond=0)


def utc_now() -> datetime:
    return datetime.now(UTC)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
