"""Which regular expressions of an adapter match which modules, found in bounded time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from engine_core.errors import AdapterError

from . import pattern_process
from .refusals import invalid_adapter

_LIMIT_S = 5
_START_LIMIT_S = 60


class Question(NamedTuple):
    """Which of these is the first to match the start of a text, or with `whole` all of it?"""

    expressions: Sequence[str]
    whole: bool


class FirstMatch(NamedTuple):
    """The number of the expression, and what its group named `idx` has; None without such a group."""

    number: int
    idx: str | None


def first_matches(questions: Mapping[str, Question], texts: Sequence[str]) -> dict[str, list[FirstMatch | None]]:
    """For each setting's question, its answer for each text, as Python's `re` gives it. Takes some 30 ms.

    Raises AdapterError, naming the setting, for what is no regular expression, and if all of it takes more than 5 s of
    processor time or a gigabyte.
    """
    if not questions:
        return {}
    task = {
        "texts": list(texts),
        "questions": {name: {"expressions": q.expressions, "whole": q.whole} for name, q in questions.items()},
        "seconds": _LIMIT_S,
    }
    try:
        # Without the site's packages it starts at once. In a group of its own a terminal's Ctrl-C does not reach it; in
        # a session of its own its niceness would count for nothing beside the engine (Linux's autogroups).
        child = subprocess.run(
            [sys.executable, "-I", "-S", str(Path(pattern_process.__file__))],
            input=json.dumps(task).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_START_LIMIT_S,
            process_group=0,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _too_long(questions) from None
    except OSError as error:
        raise invalid_adapter(f"no process could be started for its regular expressions: {error.strerror}") from None
    if child.returncode:
        raise _too_long(questions)
    answer = json.loads(child.stdout)
    if "error" in answer:
        raise invalid_adapter(str(answer["error"]))
    return {
        name: [None if found is None else FirstMatch(*found) for found in answers]
        for name, answers in answer["answers"].items()
    }


def _too_long(questions: Mapping[str, Question]) -> AdapterError:
    return invalid_adapter(
        f"the regular expressions of {', '.join(questions)} take more than {_LIMIT_S} s, or too much memory, on this "
        "model's modules"
    )
