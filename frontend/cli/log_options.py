"""The options of the log, for every command that runs processes."""

from __future__ import annotations

import os
from typing import Annotated

from ipc.logs import LOG_FORMAT_ENV, LOG_LEVEL_ENV, LogFormat, LogLevel, configure_logging

from .options import option

_PANEL = "Log"

LogFormatOption = Annotated[
    LogFormat, option(_PANEL, "One event per line, as text or as a JSON object.", envvar=LOG_FORMAT_ENV)
]
LogLevelOption = Annotated[LogLevel, option(_PANEL, "Least severe events to log.", envvar=LOG_LEVEL_ENV)]


def log_as(process: str, log_format: LogFormat, log_level: LogLevel) -> None:
    """Configure the log of this process, called `process` there, and of all that it starts."""
    os.environ[LOG_FORMAT_ENV] = log_format
    os.environ[LOG_LEVEL_ENV] = log_level
    configure_logging(process)
