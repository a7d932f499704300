"""`foreword chat` with pictures: what is attached goes with the next message, and only with that."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from frontend.terminal.attachments import MAX_FILE_BYTES, read_attachment
from frontend.terminal.commands import run_command
from frontend.terminal.conversation import Conversation

PNG = b"\x89PNG\r\n\x1a\nnot much"
URL = "data:image/png;base64," + base64.b64encode(PNG).decode()


@pytest.fixture
def cat(tmp_path: Path) -> Path:
    file = tmp_path / "my cat.png"
    file.write_bytes(PNG)
    return file


def test_a_file_becomes_a_data_url(cat: Path) -> None:
    attachment = read_attachment(cat)
    assert attachment.part() == {"type": "image_url", "image_url": {"url": URL}}
    assert str(attachment) == "my cat.png (16 bytes)"
    assert URL not in repr(attachment)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("gone.png", None, "cannot read .*gone.png: No such file"),
        ("notes.txt", b"text", "no picture by its name"),
        ("picture", PNG, "no picture by its name"),
        ("empty.jpg", b"", "is empty"),
    ],
)
def test_what_cannot_be_attached(tmp_path: Path, name: str, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        read_attachment(tmp_path / name)


def test_a_file_that_is_too_large(tmp_path: Path) -> None:
    file = tmp_path / "huge.png"
    with file.open("wb") as opened:
        opened.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(ValueError, match=str(MAX_FILE_BYTES)):
        read_attachment(file)


@pytest.mark.parametrize("quote", ["'{}'", '"{}"', "{}"])
def test_a_file_may_be_quoted_as_terminals_do(cat: Path, quote: str) -> None:
    dropped = quote.format(cat) if quote != "{}" else str(cat).replace(" ", "\\ ")
    assert run_command(Conversation(), f"/image {dropped}") == "with the next message: my cat.png (16 bytes)"


def test_a_name_that_looks_quoted_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("Anna's cat.png").write_bytes(PNG)
    assert run_command(Conversation(), "/image Anna's cat.png") == "with the next message: Anna's cat.png (16 bytes)"
    assert run_command(Conversation(), "/image Anna's dog.png").startswith("cannot read Anna's dog.png: No such file")


def test_pictures_go_with_one_message(cat: Path, tmp_path: Path) -> None:
    conversation = Conversation("be brief")
    assert run_command(conversation, f"/image {cat}") == "with the next message: my cat.png (16 bytes)"
    assert run_command(conversation, f"/image {cat}").count("my cat.png") == 2
    assert "No such file" in run_command(conversation, f"/image {tmp_path / 'dog.png'}")
    question = conversation.ask("which one?")
    asked = [
        {"role": "system", "content": "be brief"},
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": URL}}] * 2
            + [{"type": "text", "text": "which one?"}],
        },
    ]
    assert conversation.messages(question) == asked
    conversation.turns.append((question, "the left one"))
    later = conversation.ask("sure?")
    assert conversation.messages(later) == [
        *asked,
        {"role": "assistant", "content": "the left one"},
        {"role": "user", "content": "sure?"},
    ]
    run_command(conversation, f"/save {tmp_path / 'chat.json'}")
    assert json.loads((tmp_path / "chat.json").read_text())["messages"] == conversation.messages()
    assert run_command(conversation, "/undo") == "forgotten: my cat.png (16 bytes); my cat.png (16 bytes): which one?"


@pytest.mark.parametrize("command", ["/image", "/reset"])
def test_what_was_attached_can_be_left_out_again(cat: Path, command: str) -> None:
    conversation = Conversation()
    run_command(conversation, f"/image {cat}")
    run_command(conversation, command)
    assert conversation.ask("hi").content() == "hi"
