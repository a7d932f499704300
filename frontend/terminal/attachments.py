"""Pictures from this machine, as a request carries them."""

from __future__ import annotations

import base64
import mimetypes
from dataclasses import dataclass, field
from pathlib import Path

from rich.filesize import decimal

MAX_FILE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Attachment:
    """A picture's file name, and its content as a data URL."""

    name: str
    url: str = field(repr=False)
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.name} ({decimal(self.num_bytes)})"

    def part(self) -> dict[str, object]:
        """As a part of a message of the OpenAI API."""
        return {"type": "image_url", "image_url": {"url": self.url}}


def read_attachment(file: Path) -> Attachment:
    """The picture in `file`. The server finds out whether it is one; here its name must say so.

    Raises ValueError with a line for the person: there is no such file, it is no picture by its name, or too large.
    """
    file = file.expanduser()
    kind, _ = mimetypes.guess_type(file.name)
    if kind is None or not kind.startswith("image/"):
        raise ValueError(f"{file} is no picture by its name (.png, .jpg, .webp, .gif, ...)")
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror or error}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"{file} has more than {MAX_FILE_BYTES} bytes")
    if not content:
        raise ValueError(f"{file} is empty")
    return Attachment(file.name, f"data:{kind};base64,{base64.b64encode(content).decode()}", len(content))
