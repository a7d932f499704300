"""Valid messages made invalid, or strange, in every way one can think of: for fuzzing both ends of the wire."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

_HEADER = "<4sHHQQ"
_NUMBERS = (0, 1, 2, 255, 2**16 - 1, 2**31 - 1, 2**32, 2**53, 2**63 - 1, 2**64 - 1, -1, -(2**31), -(2**63))
_VALUES: tuple[Any, ...] = (None, True, False, 0.5, float("nan"), float("inf"), "", "x" * 40, "\ud7ff", b"", b"\xff")
_TAGS = (
    "hello",
    "add",
    "abort",
    "heartbeat",
    "goodbye",
    "welcome",
    "refused",
    "outputs",
    "want_features",
    "supply_feature",
    "no such tag",
)
_TYPE_BYTES = b"\xc1\xc4\xc6\xc7\xc9\xca\xcb\xcf\xd3\xd4\xd8\xd9\xdb\xdc\xdd\xde\xdf\x9f\x8f\xbf"

Frames = list[bytes]


def mutate(frames: Sequence[bytes | memoryview], rng: random.Random) -> Frames:
    """A damaged copy of one message; now and then it is still a valid one."""
    mutated = [bytes(frame) for frame in frames]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        mutated = rng.choices(_MUTATIONS, _WEIGHTS)[0](mutated, rng)
    return mutated


def _change_bytes(frames: Frames, rng: random.Random) -> Frames:
    place, frame = _some_frame(frames, rng)
    changed = bytearray(frame)
    for _ in range(rng.randint(1, 4)):
        if changed:
            changed[rng.randrange(len(changed))] = rng.randrange(256)
    return _replaced(frames, place, bytes(changed))


def _change_type_byte(frames: Frames, rng: random.Random) -> Frames:
    """A wrong MessagePack type leads to a wrong, possibly enormous, length."""
    place, frame = _some_frame(frames, rng)
    if not frame:
        return frames
    at = rng.randrange(len(frame))
    return _replaced(frames, place, frame[:at] + bytes([rng.choice(_TYPE_BYTES)]) + frame[at + rng.randrange(2) :])


def _cut(frames: Frames, rng: random.Random) -> Frames:
    place, frame = _some_frame(frames, rng)
    return _replaced(frames, place, frame[: rng.randrange(len(frame) + 1)])


def _extend(frames: Frames, rng: random.Random) -> Frames:
    place, frame = _some_frame(frames, rng)
    return _replaced(frames, place, frame + rng.randbytes(rng.randint(1, 8)))


def _change_frame_list(frames: Frames, rng: random.Random) -> Frames:
    changed = list(frames)
    action = rng.randrange(4)
    if action == 0 and len(changed) > 1:
        del changed[rng.randrange(len(changed))]
    elif action == 1:
        changed.insert(rng.randrange(len(changed) + 1), rng.choice(changed))
    elif action == 2:
        rng.shuffle(changed)
    else:
        changed += [rng.randbytes(rng.randrange(4))] * rng.randint(1, 3)
    return changed


def _change_header(frames: Frames, rng: random.Random) -> Frames:
    """Another version, epoch, sequence number or count of frames in a header that is well formed."""
    if len(frames[0]) != struct.calcsize(_HEADER):
        return frames
    fields = list(struct.unpack(_HEADER, frames[0]))
    place = rng.randrange(1, 5)
    most = 2**16 - 1 if place < 3 else 2**64 - 1
    number = rng.choice((*_NUMBERS, rng.getrandbits(64), fields[place] + rng.choice((-1, 1, 2))))
    fields[place] = min(max(number, 0), most)
    return _replaced(frames, 0, struct.pack(_HEADER, *fields))


def _change_value(frames: Frames, rng: random.Random) -> Frames:
    """A body that is MessagePack, with a value somewhere in it replaced, removed, repeated or wrapped."""
    if len(frames) < 2:
        return frames
    try:
        body = msgspec.msgpack.decode(frames[1])
        return _replaced(frames, 1, msgspec.msgpack.encode(_with_change(body, rng)))
    except (msgspec.MsgspecError, ValueError, OverflowError, TypeError, RecursionError):
        return frames


def _with_change(value: Any, rng: random.Random) -> Any:
    if isinstance(value, list) and value and rng.random() < 0.85:
        changed = list(value)
        place = rng.randrange(len(changed))
        action = rng.randrange(8)
        if action == 0:
            del changed[place]
        elif action == 1:
            changed.insert(place, changed[place])
        elif action == 2:
            changed += [_some_value(rng)] * rng.choice((1, 1, 500))
        else:
            changed[place] = _with_change(changed[place], rng)
        return changed
    action = rng.randrange(6)
    if action == 0:
        return [value] * rng.randint(0, 3)
    if action == 1:
        return {"key": value}
    if action == 2 and isinstance(value, int):
        return value + rng.choice((-1, 1, 1000))
    return _some_value(rng)


def _nest(frames: Frames, rng: random.Random) -> Frames:
    tag = rng.choice(_TAGS).encode()
    depth = rng.choice((3, 100, 2000))
    return _replaced(frames, 1, b"\x92" + bytes([0xA0 + len(tag)]) + tag + rng.choice((b"\x91", b"\x81\x01")) * depth)


def _some_value(rng: random.Random) -> Any:
    return rng.choice((rng.choice(_NUMBERS), rng.choice(_VALUES), rng.choice(_TAGS), [], {}, [[]], [None] * 3))


def _some_frame(frames: Frames, rng: random.Random) -> tuple[int, bytes]:
    place = rng.randrange(len(frames))
    return place, frames[place]


def _replaced(frames: Frames, place: int, frame: bytes) -> Frames:
    return [*frames[:place], frame, *frames[place + 1 :]]


_MUTATIONS: tuple[Callable[[Frames, random.Random], Frames], ...] = (
    _change_bytes,
    _change_type_byte,
    _cut,
    _extend,
    _change_frame_list,
    _change_header,
    _change_value,
    _nest,
)
_WEIGHTS = (4, 2, 2, 1, 2, 2, 6, 0.05)
