"""What a person is told to paste when the server is ready."""

from __future__ import annotations

from pathlib import Path

import pytest

from frontend.announcement import SAMPLE_PICTURE, announcement
from tests.wire_peers import ROOT

URL = "http://127.0.0.1:8123"


def said(*, has_chat_template: bool = True, sees_pictures: bool = True, needs_key: bool = False) -> str:
    return announcement(URL, has_chat_template=has_chat_template, sees_pictures=sees_pictures, needs_key=needs_key)


def test_a_model_is_asked_what_it_can_answer() -> None:
    assert "/v1/completions" in said(has_chat_template=False) and "/chat" not in said(has_chat_template=False)
    assert "/v1/chat/completions" in said(sees_pictures=False) and "--image" not in said(sees_pictures=False)
    assert "/v1/chat/completions" in said() and f"--url {URL}" in said()


def test_a_key_goes_into_every_command() -> None:
    commands = [line for line in said(needs_key=True).splitlines() if URL in line and "docs" not in line.split()[-1]]
    assert [line.count("KEY") for line in commands] == [1, 1]
    assert "KEY" not in said()


def test_without_the_sample_picture_there_is_no_command_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frontend.announcement.SAMPLE_PICTURE", tmp_path / "none.png")
    assert said() == said(sees_pictures=False)


def test_paths_are_as_one_types_them_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert " docs/pictures/" in said()
    monkeypatch.chdir(tmp_path)
    assert f" {SAMPLE_PICTURE} " in said()
