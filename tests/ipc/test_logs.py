"""Every line of the log is an event with fields, for people or for machines."""

from __future__ import annotations

import ast
import io
import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ipc.logs import LOG_FORMAT_ENV, LOG_LEVEL_ENV, RESERVED_FIELDS, JsonFormatter, configure_logging, parse_template

ROOT = Path(__file__).parents[2]
PACKAGES = ("frontend", "engine_core", "ipc", "kernels", "multimodal")


def as_json(template: str, *args: Any, **settings: Any) -> dict[str, Any]:
    record = logging.getLogger("some.module").makeRecord(
        "some.module", logging.INFO, "file", 1, template, args, settings.get("exc_info")
    )
    line = JsonFormatter("engine").format(record)
    assert "\n" not in line
    return json.loads(line)  # type: ignore[no-any-return]


def fields(template: str, *args: Any) -> dict[str, Any]:
    line = as_json(template, *args)
    return {name: value for name, value in line.items() if name not in RESERVED_FIELDS}


def test_a_line_says_when_where_and_what() -> None:
    line = as_json("engine_ready epoch=%d model=%s", 2**64 - 1, "tiny")
    assert line.pop("ts").endswith("+00:00")
    assert line.pop("pid") > 0
    assert line == {"level": "info", "process": "engine", "event": "engine_ready", "epoch": 2**64 - 1, "model": "tiny"}


@pytest.mark.parametrize(
    ("spec", "value", "expected"),
    [
        ("%s", "two words", "two words"),
        ("%r", "it's\n", "it's\n"),
        ("%.4r", "much too long", "much"),
        ("%s", None, None),
        ("%s", 0.25, 0.25),
        ("%s", True, True),
        ("%s", Path("/x"), "/x"),
        ("%r", ValueError("no"), "ValueError('no')"),
        ("%d", 3.0, 3),
        ("%.1f", 1.26, 1.3),
        ("%g", 300.0, 300),
        ("%s", float("nan"), "nan"),
        ("%f", float("inf"), "inf"),
        ("%s", "\ud800", "\ud800"),
        ("on", None, "on"),
    ],
)
def test_fields_keep_their_types(spec: str, value: Any, expected: Any) -> None:
    args = () if spec == "on" else (value,)
    assert fields(f"happened before=%d field={spec} after=%d", 1, *args, 2) == {
        "before": 1,
        "field": expected,
        "after": 2,
    }


@pytest.mark.parametrize(
    ("text", "args"),
    [("A sentence.", ()), ("took %s of %s", (1, 2)), ("event=%d%%", (5,)), ("event field=%s", ()), ("100%", ())],
)
def test_what_has_no_events_form_is_a_message(text: str, args: tuple[Any, ...]) -> None:
    line = as_json(text, *args)
    assert (line["event"], line["logger"]) == ("message", "some.module")
    assert line["message"] == (text % args if args else text)


def test_an_exception_is_a_field() -> None:
    try:
        raise ValueError("no such thing")
    except ValueError:
        line = as_json("step_failed requests=%d", 2, exc_info=sys.exc_info())
    assert line["requests"] == 2
    assert line["exception"].startswith("Traceback") and line["exception"].endswith("ValueError: no such thing")


def log_calls() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                    continue
                owner = node.func.value
                if isinstance(owner, ast.Name) and owner.id == "logger":
                    template = node.args[1 if node.func.attr == "log" else 0]
                    assert isinstance(template, ast.Constant), f"{path}:{node.lineno}"
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", template.value


def test_every_call_in_the_project_is_an_event_with_fields_of_free_names() -> None:
    calls = list(log_calls())
    assert len(calls) > 30
    for place, template in calls:
        parsed = parse_template(template)
        assert parsed is not None, f"{place}: {template!r}"
        assert not RESERVED_FIELDS & set(parsed[1]), f"{place}: {template!r}"


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., io.StringIO]]:
    root, captured = logging.getLogger(), io.StringIO()
    before = root.handlers[:], root.level, sys.excepthook

    def configure(**environment: str) -> io.StringIO:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        configure_logging("http", captured)
        return captured

    yield configure
    root.handlers[:], _ = before[0], logging.captureWarnings(False)
    root.setLevel(before[1])
    sys.excepthook = before[2]


def test_text_is_the_default(configured: Callable[..., io.StringIO]) -> None:
    log = configured()
    logging.getLogger("x").debug("unseen")
    logging.getLogger("x").info("engine_ready epoch=%d", 7)
    assert log.getvalue().endswith(" INFO engine_ready epoch=7\n") and " http[" in log.getvalue()


def test_the_environment_chooses_format_and_level(configured: Callable[..., io.StringIO]) -> None:
    log = configured(**{LOG_FORMAT_ENV: "json", LOG_LEVEL_ENV: "warning"})
    logging.getLogger("x").info("unseen")
    logging.getLogger("x").warning("seen n=%d", 1)
    warnings.warn("other people's code", stacklevel=1)
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["seen", "message"]
    assert "other people's code" in lines[1]["message"]


def test_a_format_that_does_not_exist_is_named(configured: Callable[..., io.StringIO]) -> None:
    with pytest.raises(ValueError, match=f"{LOG_FORMAT_ENV} is 'xml', not one of text, json"):
        configured(**{LOG_FORMAT_ENV: "xml"})


def test_a_crash_is_a_line_too() -> None:
    code = """
import os, threading
os.environ["FOREWORD_LOG_FORMAT"] = "json"
from ipc.logs import configure_logging
configure_logging("engine")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise RuntimeError("over")
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    lines = [json.loads(line) for line in result.stderr.splitlines()]
    assert [line["event"] for line in lines] == ["uncaught_exception"] * 2
    assert "ZeroDivisionError" in lines[0]["exception"] and "RuntimeError: over" in lines[1]["exception"]
