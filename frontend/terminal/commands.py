"""The lines that begin with a slash."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from .attachments import read_attachment
from .conversation import Conversation

# Each takes the conversation and what stands behind its name, and returns what to tell.
Command = Callable[[Conversation, str], str]


def is_command(line: str) -> bool:
    """Whether `line` is for us. A space before the slash makes it a message."""
    return line.startswith("/")


def run_command(conversation: Conversation, line: str) -> str:
    """Do what `line` says to `conversation`; returns what to tell the person, mistakes included."""
    name, _, rest = line.partition(" ")
    if name not in COMMANDS:
        return f"{name} is no command; /help lists them (a space before the / sends it as text)"
    _, _, command = COMMANDS[name]
    return command(conversation, rest.strip())


def _help(_: Conversation, __: str) -> str:
    lines = [f"{f'{name} {argument}':<14} {meaning}" for name, (argument, meaning, _) in COMMANDS.items()]
    lines.append(f"{'Ctrl-C, Ctrl-D':<14} stop the answer; end. A \\ at the end of a line continues it.")
    return "\n".join(lines)


def _reset(conversation: Conversation, _: str) -> str:
    conversation.turns.clear()
    conversation.pictures.clear()
    return "a new conversation"


def _image(conversation: Conversation, file: str) -> str:
    if not file:
        conversation.pictures.clear()
        return "no pictures go with the next message"
    try:
        conversation.pictures.append(read_attachment(_path(file)))
    except ValueError as error:
        return str(error)
    return f"with the next message: {'; '.join(map(str, conversation.pictures))}"


def _path(file: str) -> Path:
    """As it is typed, or as a terminal quotes what is dropped on it."""
    path = Path(file).expanduser()
    if path.exists():
        return path
    try:
        words = shlex.split(file)
    except ValueError:
        return path
    return Path(words[0]).expanduser() if len(words) == 1 else path


def _system(conversation: Conversation, text: str) -> str:
    conversation.system = text or None
    return "system prompt set" if text else "no system prompt"


def _undo(conversation: Conversation, _: str) -> str:
    if not conversation.turns:
        return "there is nothing to undo"
    question, _ = conversation.turns.pop()
    return f"forgotten: {question}"


def _save(conversation: Conversation, file: str) -> str:
    if not file:
        return "/save needs the name of a file"
    try:
        conversation.save(Path(file))
    except OSError as error:
        return f"cannot write {file}: {error.strerror or error}"
    return f"saved in {file}"


COMMANDS: dict[str, tuple[str, str, Command]] = {
    "/image": ("FILE", "Send a picture with the next message; without FILE, send none.", _image),
    "/reset": ("", "Forget the conversation, but not the system prompt.", _reset),
    "/system": ("TEXT", "Set the system prompt; without TEXT, have none.", _system),
    "/undo": ("", "Forget the last turn.", _undo),
    "/save": ("FILE", "Write the conversation as JSON; replaces FILE.", _save),
    "/help": ("", "Show this.", _help),
}
