"""What `foreword serve` and `foreword engine` do before they supervise."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from engine_core import ModelNotFoundError, ResolvedModel, resolve_model
from frontend.launch import SupervisionPolicy
from ipc.logs import LogFormat, LogLevel

from .log_options import log_as
from .options import fail

# What a child may need beyond the time its requests get.
_STOP_MARGIN_S = 5.0


def begin(command: str, log_format: LogFormat, log_level: LogLevel) -> None:
    """Set up the log, and end on signals as long as nothing else does."""
    log_as(command, log_format, log_level)
    _exit_on_signals()


def find_model(model: str) -> ResolvedModel:
    """As `resolve_model`, but a model that is not there ends the command."""
    try:
        return resolve_model(model)
    except ModelNotFoundError as error:
        fail(str(error))


def own_names(model: str, resolved: ResolvedModel) -> tuple[str, ...]:
    """The model's name, and what it was asked for by, unless that is merely where its file lies."""
    return (resolved.name,) if Path(model).expanduser().is_file() else tuple(dict.fromkeys((resolved.name, model)))


def patience(drain_timeout_s: float) -> SupervisionPolicy:
    """Of a supervisor whose children may take `drain_timeout_s` to let requests end."""
    return SupervisionPolicy(stop_timeout_s=drain_timeout_s + _STOP_MARGIN_S)


def _exit_on_signals() -> None:
    """Until the supervisor has handlers of its own, let a signal unwind the stack, so that what was begun is undone."""

    def leave(number: int, _: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
