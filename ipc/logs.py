"""The log of every process: one event with fields per line, as text or as JSON.

A call says `logger.info("engine_ready epoch=%d model=%s", epoch, model)`: an event, then fields. As text the line is
just that. As JSON each field keeps its type. The environment tells format and level, so that child processes inherit
them.
"""

from __future__ import annotations

import datetime
import functools
import json
import logging
import math
import os
import re
import sys
import threading
from typing import Any, Literal, TextIO, get_args

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

LOG_FORMAT_ENV = "FOREWORD_LOG_FORMAT"
LOG_LEVEL_ENV = "FOREWORD_LOG_LEVEL"

# What a line of JSON holds besides its event's fields; no event may have a field of such a name.
RESERVED_FIELDS = frozenset({"ts", "level", "process", "pid", "event", "logger", "message", "exception"})

_SPEC = r"%[-+ #0]*\d*(?:\.(?P<precision>\d+))?(?P<type>[a-z])"
_EVENT = re.compile(r"(?P<event>[a-z][a-z0-9_]*)(?P<fields>(?: [a-z][a-z0-9_]*=[^\s=]+)*)")

logger = logging.getLogger(__name__)


def configure_logging(process: str, stream: TextIO | None = None) -> None:
    """Send this process's log to `stream` (standard error), as the environment says; `process` names it there.

    Raises:
        ValueError: the environment asks for a format or a level that there is not.
    """
    log_format = _from_environment(LOG_FORMAT_ENV, get_args(LogFormat))
    level = _from_environment(LOG_LEVEL_ENV, ("info", *get_args(LogLevel)))
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    if log_format == "json":
        handler.setFormatter(JsonFormatter(process))
        # A line that is no JSON would break what reads them.
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        threading.excepthook = lambda args: _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s {process}[{os.getpid()}] %(levelname)s %(message)s"))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())


def _from_environment(name: str, allowed: tuple[str, ...]) -> str:
    """Its value, the first of `allowed` if it is not set."""
    value = os.environ.get(name) or allowed[0]
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}, not one of {', '.join(dict.fromkeys(allowed))}")
    return value


def _log_uncaught(kind: type[BaseException], error: BaseException | None, traceback: Any) -> None:
    if issubclass(kind, KeyboardInterrupt):
        return
    logger.critical("uncaught_exception", exc_info=(kind, error or kind(), traceback))


class JsonFormatter(logging.Formatter):
    """One JSON object per record: `ts` (UTC), `level`, `process`, `pid`, `event` and the event's fields.

    What does not have an event's form (other libraries' records) becomes the event `message`, with its text in the
    field `message` and its origin in `logger`.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "ts": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": record.process,
            **_event(record),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _event(record: logging.LogRecord) -> dict[str, Any]:
    args = record.args if isinstance(record.args, tuple) else (record.args,)
    template = parse_template(record.msg) if isinstance(record.msg, str) else None
    if template is None or sum(isinstance(value, _Argument) for value in template[1].values()) != len(args):
        return {"event": "message", "logger": record.name, "message": record.getMessage()}
    event, fields = template
    remaining = iter(args)
    return {
        "event": event,
        **{
            name: value.typed(next(remaining)) if isinstance(value, _Argument) else value
            for name, value in fields.items()
        },
    }


class _Argument:
    """A field that is an argument of the logging call; `precision` bounds characters, or digits after the point."""

    def __init__(self, kind: str, precision: int | None) -> None:
        self._kind = kind
        self._precision = precision

    def typed(self, value: Any) -> Any:
        if self._kind in "di":
            return int(value)
        if self._kind in "efg":
            number = float(value)
            if not math.isfinite(number):
                return str(number)
            return number if self._precision is None or self._kind != "f" else round(number, self._precision)
        if value is None or isinstance(value, bool | int | float):
            return value if not isinstance(value, float) or math.isfinite(value) else str(value)
        text = value if isinstance(value, str) else repr(value) if self._kind == "r" else str(value)
        return text if self._precision is None else text[: self._precision]


@functools.lru_cache(maxsize=1024)
def parse_template(template: str) -> tuple[str, dict[str, _Argument | str]] | None:
    """The event and its fields, each an argument or a constant; None if `template` has another form."""
    match = _EVENT.fullmatch(template)
    if match is None:
        return None
    fields: dict[str, _Argument | str] = {}
    for part in match["fields"].split():
        name, value = part.split("=", 1)
        spec = re.fullmatch(_SPEC, value)
        if spec is None and "%" in value:
            return None
        precision = None if spec is None or spec["precision"] is None else int(spec["precision"])
        fields[name] = value if spec is None else _Argument(spec["type"], precision)
    return match["event"], fields
