"""A picture's identity: the hash of everything that decides what the model sees of it, and of nothing else.

The way a picture came (URL, file format, a client's name for it) is no part of it, and no part of it is left out. It is
hashed in two stages, so that what must be decoded for it is known apart from what a request says:

    pixels digest   H("foreword pixels v1\\0" ‖ u32 height ‖ u32 width ‖ u32 channels ‖ the bytes, row by row)
    content hash    H("foreword picture v1\\0" ‖ u32 + bytes: pixels digest
                                             ‖ u8: 0, 1 or 2: `stands_alone` is None, False or True
                                             ‖ u32 + bytes: the processor's fingerprint, UTF-8
                                             ‖ the processor options, as a value)

Integers are little-endian. A value is a letter and what it takes to read it back: `n` None, `f` False, `t` True, `i`
u32 + decimal digits, `d` an IEEE 754 double, `s` u32 + UTF-8, `l` u32 number of values, then each, `m` u32 number of
entries, then each key (as `s`) and value, by key. Every part is counted or of fixed length, so no two different
pictures have equal bytes.

`encoded` names bytes before they are decoded, and `feature_key` what may be shared within one tenant.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
from collections.abc import Callable, Mapping
from typing import Literal, Protocol, get_args

import numpy as np
import xxhash

logger = logging.getLogger(__name__)

MMHashAlgo = Literal["sha256", "blake3", "xxhash"]

_PIXELS_TAG = b"foreword pixels v1\0"
_PICTURE_TAG = b"foreword picture v1\0"
_ENCODED_TAG = b"foreword encoded picture v1\0"
_URL_TAG = b"foreword picture url v1\0"
_KEY_TAG = b"foreword feature key v1\0"
_STANDS_ALONE = {None: b"\0", False: b"\1", True: b"\2"}


class _Hash(Protocol):
    def update(self, data: memoryview | bytes, /) -> object: ...

    def digest(self) -> bytes: ...


class ContentHasher:
    """Hashes pictures with one algorithm. Thread-safe; large pictures are hashed without the GIL.

    Args:
        algo: `sha256`, `blake3` (needs the package of that name) or `xxhash` (XXH3-128).
        seed: only for `xxhash`, which is not collision resistant: without one it is random per process. Processes that
            are to share a cache need the same.

    Raises:
        ValueError: unknown algorithm, or blake3 is not installed.
    """

    def __init__(self, algo: MMHashAlgo = "sha256", *, seed: str | None = None) -> None:
        self.algo: MMHashAlgo = algo
        self._new_hash = _hash_factory(algo, seed)

    def encoded(self, encoded: bytes | str) -> bytes:
        """Digest of a picture file as it came, or of a data: URL. Equal ones have equal pixels, but so may others."""
        state = self._new_hash()
        if isinstance(encoded, str):
            state.update(_URL_TAG)
            state.update(encoded.encode())
        else:
            state.update(_ENCODED_TAG)
            state.update(encoded)
        return state.digest()

    def pixels(self, pixels: np.ndarray) -> bytes:
        """Digest of decoded pixels and their shape: uint8 `[height, width, channels]`.

        Raises:
            ValueError: another type or number of dimensions.
        """
        if pixels.dtype != np.uint8 or pixels.ndim != 3:
            raise ValueError(f"pixels must be uint8 [height, width, channels], not {pixels.dtype} {list(pixels.shape)}")
        state = self._new_hash()
        state.update(_PIXELS_TAG + struct.pack("<III", *pixels.shape))
        state.update(np.ascontiguousarray(pixels).reshape(-1).data)
        return state.digest()

    def content(
        self, pixels_digest: bytes, *, options: object, fingerprint: str, stands_alone: bool | None = None
    ) -> bytes:
        """The content hash, at the algorithm's full length: 32 bytes, xxhash 16.

        `options` are whatever of the request reaches the processor: None, bools, numbers, strings, and lists and
        mappings (with strings as keys) of those. `fingerprint` is equal where processors make equal inputs of equal
        pixels and options. `stands_alone` is None where a picture's company makes no difference.

        Raises:
            TypeError: `options` has something else in it.
        """
        state = self._new_hash()
        state.update(_PICTURE_TAG + _counted(pixels_digest) + _STANDS_ALONE[stands_alone])
        state.update(_counted(fingerprint.encode()) + encode_value(options))
        return state.digest()


def feature_key(content_hash: bytes, tenant: str) -> bytes:
    """What caches of a picture's decoded, processed or encoded forms are keyed by: 32 bytes.

    Equal only for the same content and the same tenant, so that nobody learns from a fast answer what others sent.
    Always SHA-256, whatever the content was hashed with.
    """
    return hashlib.sha256(_KEY_TAG + _counted(content_hash) + _counted(tenant.encode())).digest()


def encode_value(value: object) -> bytes:
    """The one way to write a value of options (see the module). Tuples are lists; 1, 1.0 and True differ.

    Raises:
        TypeError: not a value.
    """
    match value:
        case None:
            return b"n"
        case bool():
            return b"t" if value else b"f"
        case int():
            return b"i" + _counted(str(value).encode())
        case float():
            return b"d" + struct.pack("<d", value)
        case str():
            return b"s" + _counted(value.encode())
        case list() | tuple():
            return b"l" + struct.pack("<I", len(value)) + b"".join(map(encode_value, value))
        case Mapping():
            entries = [encode_value(key) + encode_value(value[key]) for key in sorted(value)]
            return b"m" + struct.pack("<I", len(entries)) + b"".join(entries)
        case _:
            raise TypeError(f"processor options cannot have a {type(value).__name__} in them")


def _counted(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def _hash_factory(algo: MMHashAlgo, seed: str | None) -> Callable[[], _Hash]:
    match algo:
        case "sha256":
            return hashlib.sha256
        case "blake3":
            try:
                import blake3
            except ImportError:
                raise ValueError(
                    "mm_hash_algo: blake3 needs the Python package blake3, which is not installed; use sha256"
                ) from None
            return blake3.blake3
        case "xxhash":
            risk = "crafted pictures can hit a stranger's cache"
            logger.warning("hash_not_cryptographic algo=%s risk=%r", algo, risk)
            # As XXH3's own seed it decides how every byte is mixed in; put before the data it would only be added to
            # what is the same for all seeds.
            seed_bytes = os.urandom(32) if seed is None else hashlib.sha256(seed.encode()).digest()
            number = int.from_bytes(seed_bytes[:8], "little")
            return lambda: xxhash.xxh3_128(seed=number)
        case _:
            raise ValueError(f"mm_hash_algo: {algo!r} is none of {', '.join(get_args(MMHashAlgo))}")
