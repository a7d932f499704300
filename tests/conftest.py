"""What all tests share."""

import os
import signal
from collections.abc import Generator
from typing import Any

import pytest

# Kernels' modules ask for it when they are imported: without a GPU they can only be interpreted.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Before anything loads torch: it decides how the model's threads wait, and without it tests crawl on busy machines.
import engine_core.model  # noqa: F401

# A shell's background jobs ignore Ctrl-C, and so would every program a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """What a process of tests tells the one that counts is sent as UTF-8, which some tests' logs are not."""
    report = yield
    return _sendable(report)


def _sendable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_sendable(key): _sendable(each) for key, each in value.items()}
    return [_sendable(each) for each in value] if isinstance(value, list | tuple) else value
