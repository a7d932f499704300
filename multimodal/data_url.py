"""`data:` URLs: content that stands in its own address."""

from __future__ import annotations

import binascii
from collections.abc import Iterator
from urllib.parse import unquote_to_bytes

from .errors import MediaError

PIECE_CHARS = 1 << 18
"""Decoding holds Python's lock; between two pieces others get it. A multiple of 4, so base64 can be cut there."""
ESCAPE_CHARS = 3
SPACES = "\t\n\f\r "


def decode_data_url(url: str, max_bytes: int) -> bytes:
    """What a `data:` URL contains; its media type is not looked at, since the content says what it is.

    Base64 must be of the standard alphabet, with its padding; ASCII white space in it is skipped, and `%3D` and so on
    are read. Raises MediaError, before decoding if it is too large: `max_bytes` limits what comes out.
    """
    head, comma, body = url[len("data:") :].partition(",")
    if not comma:
        raise MediaError("a data: URL without a comma has no content")
    if head.rstrip().lower().endswith(";base64"):
        return _decode_base64(body, max_bytes)
    _check_size(-(-len(body) // ESCAPE_CHARS), max_bytes, "at least ")
    decoded = _unescape(body)
    _check_size(len(decoded), max_bytes)
    return decoded


def _decode_base64(body: str, max_bytes: int) -> bytes:
    if "%" in body:
        _check_size(len(body) // ESCAPE_CHARS // 4 * 3, max_bytes, "at least ")
        body = _unescape(body).decode("latin-1")
    if not body.isascii():
        raise MediaError("the base64 data has characters that are not base64")
    if any(space in body for space in SPACES):
        body = body.translate(dict.fromkeys(map(ord, SPACES)))
    if len(body) % 4:
        raise MediaError(f"the base64 data is incomplete: {len(body)} characters, no multiple of 4 (padding included)")
    if body.find("=", 0, max(0, len(body) - 4)) >= 0:
        raise MediaError("the base64 data has padding ('=') before its end")
    _check_size(len(body) // 4 * 3 - body.count("=", max(0, len(body) - 4)), max_bytes)
    try:
        pieces = (body[start : start + PIECE_CHARS] for start in range(0, len(body), PIECE_CHARS))
        return b"".join(binascii.a2b_base64(piece, strict_mode=True) for piece in pieces)
    except binascii.Error as error:
        raise MediaError(f"the base64 data is broken: {error}") from error


def _unescape(text: str) -> bytes:
    """`%41` → `A`. In pieces, since the standard library makes an object of each escape."""
    return b"".join(map(unquote_to_bytes, _pieces_between_escapes(text)))


def _pieces_between_escapes(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = min(start + PIECE_CHARS, len(text))
        if end < len(text) and (cut := text.find("%", end - ESCAPE_CHARS + 1, end)) >= 0:
            end = cut
        yield text[start:end]
        start = end


def _check_size(num_bytes: int, max_bytes: int, how_exact: str = "") -> None:
    if num_bytes > max_bytes:
        raise MediaError(f"the data: URL holds {how_exact}{num_bytes} bytes, more than {max_bytes}")
