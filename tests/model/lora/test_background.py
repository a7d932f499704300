"""Reading beside steps."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine_core.model.lora.background import in_background


def test_where_nobody_may_step_back_it_is_computed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError("sandbox")

    monkeypatch.setattr(os, "setpriority", refuse)
    assert in_background(lambda: 7) == 7


def test_threads_give_way_soon_meanwhile_and_as_ever_afterwards() -> None:
    before_s = sys.getswitchinterval()
    with ThreadPoolExecutor(4) as threads:
        within = list(threads.map(lambda _: in_background(sys.getswitchinterval), range(20)))
    assert max(within) < before_s
    with pytest.raises(ZeroDivisionError):
        in_background(lambda: 1 // 0)
    assert sys.getswitchinterval() == before_s
