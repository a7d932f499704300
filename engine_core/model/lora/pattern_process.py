"""Regular expressions of strangers, in a process of their own. Run as a script: imports little, and nothing of ours.

Some expressions take for ever, and Python's `re` holds the interpreter's lock until it is done: beside an engine that
would be the end of all requests. No other library means the same by every expression.

Standard input: `{"texts": [...], "questions": {name: {"expressions": [...], "whole": bool}}, "seconds": ..}`.
Standard output: `{"answers": {name: [[index, idx] or null, ...]}}`, for each text the first expression that matches its
start (`whole`: all of it) and what its group `idx` has; or `{"error": ...}`.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys

_MEMORY_BYTES = 1 << 30


def main() -> None:
    task = json.load(sys.stdin)
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_CPU, (task["seconds"], task["seconds"]))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    json.dump(_answer(task), sys.stdout)


def _answer(task: dict) -> dict:
    answers = {}
    for name, question in task["questions"].items():
        try:
            compiled = [re.compile(expression) for expression in question["expressions"]]
        except (re.error, RecursionError, OverflowError) as error:
            return {"error": f"{name} has no valid regular expression: {error}"}
        answers[name] = [_first(compiled, text, question["whole"]) for text in task["texts"]]
    return {"answers": answers}


def _first(compiled: list[re.Pattern[str]], text: str, whole: bool) -> list | None:
    for index, expression in enumerate(compiled):
        match = expression.fullmatch(text) if whole else expression.match(text)
        if match is not None:
            return [index, match.groupdict().get("idx")]
    return None


if __name__ == "__main__":
    main()
