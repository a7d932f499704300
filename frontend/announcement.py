"""What a person reads when the server is ready: commands to paste that show it at work."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

# Comes with the repository, not with an installed package.
SAMPLE_PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "star_and_seven.png"


def announcement(url: str, *, has_chat_template: bool, sees_pictures: bool, needs_key: bool) -> str:
    """Where the documentation is, and a `curl` command on a line of its own that is answered.

    Of a model that sees, with the sample picture at hand, also a command that asks about it. A key that is needed is
    written `KEY`.
    """
    if has_chat_template:
        path, body = "/v1/chat/completions", '{"messages": [{"role": "user", "content": "Who are you?"}]}'
    else:
        path, body = "/v1/completions", '{"prompt": "The capital of France is"}'
    authorization = " -H 'Authorization: Bearer KEY'" if needs_key else ""
    curl = f"curl {url}{path}{authorization} -H 'Content-Type: application/json' -d '{body}'"
    lines = [f"Ready. Documentation: {url}/docs", "Try it:", "", curl]
    if has_chat_template and sees_pictures and SAMPLE_PICTURE.is_file():
        lines[-1:] = [_picture_question(url, needs_key=needs_key), "", "or without a picture:", "", curl]
    return "\n".join(["", *lines, "", ""])


def _picture_question(url: str, *, needs_key: bool) -> str:
    script = Path(sys.executable).with_name("foreword")
    command = _typed(script) if script.is_file() else "foreword"
    chat = [command, "chat", "--image", _typed(SAMPLE_PICTURE)]
    options = ["--url", url, *(["--api-key", "KEY"] if needs_key else []), "--temperature", "0"]
    return f"echo 'What do you see?' | {shlex.join([*chat, *options])}"


def _typed(path: Path) -> str:
    """As a person in this directory would type it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith(os.pardir) else relative
