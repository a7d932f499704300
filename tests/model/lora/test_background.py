"""Reading beside steps."""

from __future__ import annotations

import os

import pytest

from engine_core.model.lora.background import in_background


def test_where_nobody_may_step_back_it_is_computed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError("sandbox")

    monkeypatch.setattr(os, "setpriority", refuse)
    assert in_background(lambda: 7) == 7
