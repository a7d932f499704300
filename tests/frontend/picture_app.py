"""The application with a tiny model's own picture processor, and pictures to send it."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from frontend.open_pictures import open_pictures
from frontend.picture_config import PictureConfig
from frontend.prompt.tokenizer import ModelTokenizer, load_tokenizer
from tests.frontend.live_app import live_app
from tests.tiny_vlm_processors import save_tiny_processor


def encoded(
    color: Any = "red",
    size: tuple[int, int] = (40, 24),
    image_format: str = "PNG",
    *,
    other_pixel: tuple[int, int] | None = None,
) -> bytes:
    """A picture of one colour, but for one pixel that may be white; `size` is (width, height)."""
    file = io.BytesIO()
    picture = Image.new("RGB", size, color)
    if other_pixel is not None:
        picture.putpixel(other_pixel, (255, 255, 255))
    picture.save(file, image_format)
    return file.getvalue()


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def image(content: bytes | str = b"", **fields: Any) -> dict[str, Any]:
    """A part with a picture file, or whatever is at a URL. `fields` go beside the url."""
    url = content if isinstance(content, str) else data_url(content)
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def user(*parts: dict[str, Any] | str) -> dict[str, Any]:
    """A turn; strings are text parts."""
    return {"role": "user", "content": [text(part) if isinstance(part, str) else part for part in parts]}


def model_directory(family: str, directory: Path) -> Path:
    """A directory that the HTTP process can serve: no weights."""
    save_tiny_processor(family, directory)
    return directory


@contextmanager
def picture_app(
    engine: Any, model_dir: Path, config: PictureConfig | None = None, **settings: Any
) -> Iterator[tuple[str, ModelTokenizer]]:
    """Yields the base URL and the tokenizer."""
    pictures = open_pictures(model_dir, config or PictureConfig())
    assert pictures is not None
    tokenizer = load_tokenizer(model_dir, pictures.processor.image_token)
    with live_app(engine, tokenizer, pictures, **settings) as url:
        yield url, tokenizer
