"""TIFF directories: of TIFF files, and of the EXIF block in others.

Read here and not by Pillow: the size of a picture must be known without unpacking what a hostile file says of itself,
and an orientation must not cost a decoding (for PNG, Pillow decodes the picture to look for it behind the pixels).
"""

from __future__ import annotations

import struct
from typing import NamedTuple

ORIENTATION = 274
EXIF_PREFIX = b"Exif\x00\x00"
NUMBER_BYTES = {1: 1, 3: 2, 4: 4, 16: 8}
"""Types of a field whose values are unsigned numbers → size of one."""
VALUE_BYTES = NUMBER_BYTES | {2: 1, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 17: 8, 18: 8}
"""All types."""


class Layout(NamedTuple):
    """`order` is struct's; `is_big`: BigTIFF, whose counts and offsets have 8 bytes."""

    order: str
    is_big: bool

    @property
    def count_field(self) -> struct.Struct:
        return struct.Struct(self.order + ("Q" if self.is_big else "H"))

    @property
    def entry_field(self) -> struct.Struct:
        return struct.Struct(self.order + ("HHQ8s" if self.is_big else "HHI4s"))

    @property
    def offset_field(self) -> struct.Struct:
        return struct.Struct(self.order + ("Q" if self.is_big else "I"))


class Entry(NamedTuple):
    """A field: `value` is its value if that fits, else the offset of it, as stored."""

    tag: int
    kind: int
    num_values: int
    value: bytes


class Directory(NamedTuple):
    layout: Layout
    entries: list[Entry]
    next_offset: int

    def number(self, tag: int) -> int | None:
        """The field's value; None if there is no such field or it is not one unsigned number."""
        for entry in self.entries:
            if entry.tag == tag and entry.num_values == 1 and entry.kind in NUMBER_BYTES:
                order = "little" if self.layout.order == "<" else "big"
                return int.from_bytes(entry.value[: NUMBER_BYTES[entry.kind]], order)  # type: ignore[arg-type]
        return None


def read_start(data: bytes) -> tuple[Layout, int]:
    """(layout, offset of the first directory). Raises ValueError or struct.error if that is no TIFF."""
    order = {b"II": "<", b"MM": ">"}.get(data[:2])
    if order is None:
        raise ValueError("no byte order")
    (version,) = struct.unpack_from(order + "H", data, 2)
    if version == 42:
        return Layout(order, False), struct.unpack_from(order + "I", data, 4)[0]
    if version == 43 and struct.unpack_from(order + "HH", data, 4) == (8, 0):
        return Layout(order, True), struct.unpack_from(order + "Q", data, 8)[0]
    raise ValueError(f"version {version}")


def read_directory(data: bytes, layout: Layout, offset: int) -> Directory:
    """Raises ValueError or struct.error if it does not lie in the data."""
    count, start, end = _bounds(data, layout, offset)
    entries = [Entry(*fields) for fields in layout.entry_field.iter_unpack(data[start:end])] if count else []
    return Directory(layout, entries, layout.offset_field.unpack_from(data, end)[0])


def count_directories(data: bytes, layout: Layout, offset: int, limit: int) -> int:
    """How many are linked from `offset` on; what lies outside of the data, or closes a loop, is not counted.

    Stops at `limit` + 1 without reading any of their entries.
    """
    seen: set[int] = set()
    while offset and offset not in seen and len(seen) <= limit:
        try:
            _, _, end = _bounds(data, layout, offset)
            following = layout.offset_field.unpack_from(data, end)[0]
        except (ValueError, struct.error):
            break
        seen.add(offset)
        offset = following
    return len(seen)


def orientation(exif: bytes) -> int:
    """Of an EXIF block, with or without its prefix: 1 to 8, and 1 if it does not say, or is broken."""
    tiff = exif.removeprefix(EXIF_PREFIX)
    try:
        return valid_orientation(read_directory(tiff, *read_start(tiff)).number(ORIENTATION))
    except (ValueError, struct.error):
        return 1


def valid_orientation(value: int | None) -> int:
    return value if value is not None and 1 <= value <= 8 else 1


def _bounds(data: bytes, layout: Layout, offset: int) -> tuple[int, int, int]:
    """(number of entries, where they start, where they end)."""
    if offset > len(data):
        raise ValueError("a directory beyond the end")
    (count,) = layout.count_field.unpack_from(data, offset)
    start = offset + layout.count_field.size
    end = start + count * layout.entry_field.size
    if end > len(data):
        raise ValueError("a directory that does not end")
    return count, start, end
