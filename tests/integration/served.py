"""`foreword serve` as a person starts it: all its processes, a free port, its own log."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.wire_peers import ROOT

FOREWORD = ("-c", "from frontend.cli import main; main()")
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0

# How each line of the log begins: an event in text, or one in JSON.
_EVENT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} |\{")


@dataclass(frozen=True, slots=True)
class Server:
    """`url` as printed for a person to paste; `announced` is all that was printed, up to there."""

    url: str
    announced: str
    process: subprocess.Popen[str]

    def child(self, module: str) -> psutil.Process:
        """The child process that runs `module`."""
        (found,) = (p for p in psutil.Process(self.process.pid).children() if module in p.cmdline())
        return found


@contextmanager
def foreword_serve(model_dir: Path | None, *flags: str, program: Sequence[str] = FOREWORD) -> Iterator[Server]:
    """Yields once the server says that it is ready; stops it with SIGTERM and checks that it goes quietly:
    with 0, and with nothing in its log but events.

    Args:
        model_dir: None for whatever is served when no model is named.
        program: what Python is to run as `foreword`.
    """
    model = () if model_dir is None else (str(model_dir),)
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, *program, "serve", *model, "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
        )
        overdue = threading.Timer(START_TIMEOUT_S, process.kill)
        overdue.start()
        try:
            announced = _announced(process, log)
            overdue.cancel()
            yield Server(announced[-1].split("/v1/")[0].removeprefix("curl "), "".join(announced), process)
            process.send_signal(signal.SIGTERM)
            assert process.wait(STOP_TIMEOUT_S) == 0
            assert [line for line in _text(log).splitlines() if not _EVENT.match(line)] == []
        finally:
            overdue.cancel()
            if process.poll() is None:
                process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _announced(process: subprocess.Popen[str], log: object) -> list[str]:
    """The lines up to the one to paste that is always there."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if re.match(r"curl http://[^/]+/v1/", line):
            return lines
    raise AssertionError(f"the server ended before it was ready:\n{_text(log)}")


def _text(log: object) -> str:
    log.seek(0)  # type: ignore[attr-defined]
    return log.read()  # type: ignore[attr-defined, no-any-return]
