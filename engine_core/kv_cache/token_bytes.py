"""The token ids of blocks as the hashed layouts of `block_hash` spell them: how many, then each."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

import cbor2
import numpy as np

TOKEN_BYTES = 4

# CBOR has four classes of integers below 2^32: where each but the first starts, how many bytes its integers take, and
# its initial byte at its place in the big-endian number that those bytes make up.
_CBOR_CLASS_STARTS = np.array([24, 1 << 8, 1 << 16], dtype=np.uint64)
_CBOR_CLASS_BYTES = np.array([1, 2, 3, 5])
_CBOR_CLASS_INITIALS = np.array([0, 24 << 8, 25 << 16, 26 << 32], dtype=np.uint64)
# … and which of the eight bytes of that number are used, as eight booleans in one word.
_CBOR_CLASS_MASKS = (np.arange(8) >= 8 - _CBOR_CLASS_BYTES[:, None]).view(np.uint64)[:, 0]
# From so many blocks on numpy pays: it takes some 15 µs to begin with, and generation fills blocks one at a time.
_CBOR_MANY_BLOCKS = 12


def token_id_bytes(token_ids: Sequence[int]) -> bytes:
    """`TOKEN_BYTES` for each id, little-endian.

    Raises:
        OverflowError: an id is not within [0, 2^32).
    """
    ids = array("I", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def token_ids_of(data: bytes) -> list[int]:
    """What `token_id_bytes` was given."""
    ids = array("I", data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def own_token_bytes(token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """For each block, in Foreword's own layout. `token_ids` fill whole blocks.

    Raises:
        OverflowError: an id is not within [0, 2^32).
    """
    data, size = token_id_bytes(token_ids), TOKEN_BYTES * block_size
    count = block_size.to_bytes(4, "little")
    return [count + data[start : start + size] for start in range(0, len(data), size)]


def cbor_token_bytes(token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """For each block, a canonical CBOR array. `token_ids` fill whole blocks."""
    if len(token_ids) < _CBOR_MANY_BLOCKS * block_size:
        return _cbor_arrays(token_ids, block_size)
    try:
        values = np.array(array("I", token_ids), dtype=np.uint64)
    except OverflowError:
        return _cbor_arrays(token_ids, block_size)
    classes = np.digitize(values, _CBOR_CLASS_STARTS)
    numbers = (values + _CBOR_CLASS_INITIALS[classes]).astype(">u8")
    data = numbers.view(np.uint8)[_CBOR_CLASS_MASKS[classes].view(np.bool_)].tobytes()
    ends = _CBOR_CLASS_BYTES[classes].reshape(-1, block_size).sum(axis=1).cumsum().tolist()
    array_head = cbor2.dumps([0] * block_size)[:-block_size]
    return [array_head + data[start:end] for start, end in zip([0, *ends], ends)]


def _cbor_arrays(token_ids: Sequence[int], block_size: int) -> list[bytes]:
    starts = range(0, len(token_ids), block_size)
    return [cbor2.dumps(token_ids[start : start + block_size], canonical=True) for start in starts]
