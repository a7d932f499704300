"""Messages to frames and back: a fixed header, one MessagePack body, and payload frames. No pickle.

    frame 0   header: magic `FWRD`, protocol version (u16), number of frames (u16), epoch (u64), sequence (u64),
              little-endian
    frame 1   the message (a tagged union of structs) as MessagePack
    frame 2…  payloads: what a numpy array or a `Blob` in the message holds, in the order they appear

In the body an array stands as `[frame index, dtype, shape]`, a blob as `[frame index, number of bytes]`. Both sides
share memory with the frames: nothing large is copied. Decoding is total: whatever comes in, it returns a message or
raises `WireError`, and never allocates much more than it received. A message that lost a frame, or a part of one, is
never taken for whole; messages lost as a whole are what `sequence` is for (`ipc.sequence`).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np

PROTOCOL_VERSION = 7

Buffer: TypeAlias = bytes | memoryview
Reason = Literal["header", "version", "frames", "too_large", "body", "payload"]
MessageT = TypeVar("MessageT")

_MAGIC = b"FWRD"
_HEADER = struct.Struct("<4sHHQQ")
_HEADER_OF_ANY_VERSION = struct.Struct("<4sHHQ")
# No object, string or structured types: only what is its own memory layout.
_DTYPES = frozenset(["|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8"])
_MAX_NDIM = 8


class WireError(Exception):
    """A message that cannot be sent, or frames that are no message. The only exception of this module.

    `reason`: `header` (not ours at all), `version` (another protocol version; the rest was not looked at),
    `frames` (too few or too many), `too_large`, `body` (not MessagePack, or not of the expected type),
    `payload` (an array or blob that does not fit its frame).
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: Reason = reason


@dataclass(frozen=True, slots=True)
class WireLimits:
    """What one message may weigh. `max_body_bytes` bounds the element count too: each costs a byte or more."""

    max_frames: int = 1024
    max_body_bytes: int = 16 << 20
    max_frame_bytes: int = 512 << 20
    max_total_bytes: int = 1 << 30


DEFAULT_LIMITS = WireLimits()


class Header(NamedTuple):
    version: int
    epoch: int


class Envelope(NamedTuple, Generic[MessageT]):
    """A message with what its header says of it."""

    epoch: int
    sequence: int
    message: MessageT


class Blob:
    """Bytes too many for the body: they travel as a frame of their own, uncopied."""

    # No dataclass: msgspec would encode its fields.
    __slots__ = ("data",)

    def __init__(self, data: Buffer) -> None:
        self.data = data


def pack_header(epoch: int, sequence: int, *, num_frames: int = 2, version: int = PROTOCOL_VERSION) -> bytes:
    """Frame 0. `epoch` is the engine's (0 before it is known); `sequence`: see `ipc.sequence`."""
    return _HEADER.pack(_MAGIC, version, num_frames, epoch, sequence)


def read_header(frames: Sequence[Buffer]) -> Header:
    """The header of any version: magic, version and epoch stay where they are for ever. Raises WireError(header)."""
    num_bytes = len(frames[0]) if frames else 0
    if num_bytes < _HEADER_OF_ANY_VERSION.size:
        raise WireError("header", f"{num_bytes} bytes, at least {_HEADER_OF_ANY_VERSION.size} are needed")
    magic, version, _, epoch = _HEADER_OF_ANY_VERSION.unpack_from(frames[0])
    if magic != _MAGIC:
        raise WireError("header", f"magic is {magic!r}, not {_MAGIC!r}")
    return Header(version, epoch)


def encode(message: Any, epoch: int, sequence: int, limits: WireLimits = DEFAULT_LIMITS) -> list[Buffer]:
    """The frames of `message`. Arrays (if C-contiguous) and blobs are not copied: leave them alone until sent.

    Raises:
        WireError: `too_large` or `frames` beyond the limits, `body` for what has no representation.
    """
    payloads: list[Buffer] = []

    def represent(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            if value.dtype.str not in _DTYPES or value.ndim > _MAX_NDIM:
                raise TypeError(f"an array of dtype {value.dtype.str} and {value.ndim} dimensions cannot be sent")
            # reshape(-1) of a contiguous array is a view; a cast would fail for 0 elements and 0 dimensions.
            payloads.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
            return len(payloads) - 1, value.dtype.str, value.shape
        if isinstance(value, Blob):
            payloads.append(memoryview(value.data).cast("B"))
            return len(payloads) - 1, len(payloads[-1])
        raise TypeError(f"{type(value).__name__} cannot be sent")

    try:
        body = msgspec.msgpack.Encoder(enc_hook=represent).encode(message)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError("body", str(error)) from error
    _check_sizes([body, *payloads], limits)
    return [pack_header(epoch, sequence, num_frames=2 + len(payloads)), body, *payloads]


class Decoder(Generic[MessageT]):
    """Decodes frames into messages of one (union) type. Not for use by two threads at once."""

    def __init__(self, message_type: Any, limits: WireLimits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._payloads: Sequence[Buffer] = ()
        self._decode: Callable[[Buffer], MessageT] = msgspec.msgpack.Decoder(
            message_type, dec_hook=self._restore
        ).decode

    def decode(self, frames: Sequence[Buffer]) -> Envelope[MessageT]:
        """The message, its epoch and its number. Its arrays and blobs share memory with `frames`: they are read-only.

        Raises:
            WireError: see there. Anything but `header` and `version` is raised only for our own version.
        """
        version, _ = read_header(frames)
        if version != PROTOCOL_VERSION:
            raise WireError("version", f"the peer speaks protocol {version}, this side {PROTOCOL_VERSION}")
        if len(frames[0]) != _HEADER.size:
            raise WireError("header", f"{len(frames[0])} bytes, version {version} has {_HEADER.size}")
        _, _, num_frames, epoch, sequence = _HEADER.unpack_from(frames[0])
        if len(frames) != num_frames or num_frames < 2:
            raise WireError("frames", f"{len(frames)} frames arrived, the header says {num_frames}")
        _check_sizes(frames[1:], self._limits)
        self._payloads = frames[2:]
        try:
            return Envelope(epoch, sequence, self._decode(frames[1]))
        except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as error:
            # msgspec wraps what a hook raises; ours is the better reason.
            if isinstance(error.__cause__, _PayloadError):
                raise WireError("payload", str(error)) from error
            raise WireError("body", str(error)) from error
        finally:
            self._payloads = ()

    def _restore(self, expected: type, value: Any) -> Any:
        if expected is Blob:
            if not isinstance(value, list) or len(value) != 2:
                raise _PayloadError("a blob must be [frame index, number of bytes]")
            payload = self._payload(value[0])
            if len(payload) != value[1]:
                raise _PayloadError(f"a blob of {value[1]!r} bytes, the payload has {len(payload)}")
            return Blob(memoryview(payload))
        if expected is np.ndarray:
            if not isinstance(value, list) or len(value) != 3:
                raise _PayloadError("an array must be [frame index, dtype, shape]")
            return _restore_array(self._payload(value[0]), value[1], value[2])
        raise TypeError(f"{expected} is not a wire type")

    def _payload(self, index: Any) -> Buffer:
        if type(index) is not int or not 0 <= index < len(self._payloads):
            raise _PayloadError(f"payload {index!r} of {len(self._payloads)}")
        return self._payloads[index]


class _PayloadError(ValueError):
    pass


def _restore_array(payload: Buffer, dtype: Any, shape: Any) -> np.ndarray:
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise _PayloadError(f"dtype {dtype!r} is not allowed")
    if not isinstance(shape, list) or len(shape) > _MAX_NDIM:
        raise _PayloadError(f"a shape must be a list of at most {_MAX_NDIM} sizes")
    if not all(type(size) is int and 0 <= size < 2**31 for size in shape):
        raise _PayloadError("a size in a shape must be an integer in [0, 2^31)")
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    if num_bytes != len(payload):
        raise _PayloadError(f"shape {shape} of {dtype} needs {num_bytes} bytes, the payload has {len(payload)}")
    try:
        array: np.ndarray = np.ndarray(shape, dtype, buffer=payload)
    except ValueError as error:
        # An empty array whose other sizes multiply to more than numpy can address.
        raise _PayloadError(str(error)) from error
    # The transport may deliver small frames (below its receive buffer's 8 KiB) unaligned.
    return array if array.flags.aligned else array.copy()


def _check_sizes(parts: Sequence[Buffer], limits: WireLimits) -> None:
    """`parts`: the body and the payloads."""
    if len(parts) >= limits.max_frames:
        raise WireError("frames", f"{len(parts) + 1} frames, at most {limits.max_frames} are allowed")
    sizes = [len(part) for part in parts]
    if sizes[0] > limits.max_body_bytes:
        raise WireError("too_large", f"the body has {sizes[0]} bytes, at most {limits.max_body_bytes} are allowed")
    if max(sizes) > limits.max_frame_bytes:
        raise WireError("too_large", f"a frame has {max(sizes)} bytes, at most {limits.max_frame_bytes} are allowed")
    if sum(sizes) > limits.max_total_bytes:
        raise WireError(
            "too_large", f"the message has {sum(sizes)} bytes, at most {limits.max_total_bytes} are allowed"
        )
