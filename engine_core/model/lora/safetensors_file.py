"""Tensors out of a safetensors file that may be broken, or be written to meanwhile.

Read, and not mapped: what is cut off a mapped file while it is looked at ends the process. The format is 8 bytes with
the length of a JSON object, that object (name → type, shape, where in what follows), and the numbers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta, Struct

from engine_core.errors import AdapterError

from .refusals import invalid_adapter, quoted

# Room for some 25,000 tensors, and parsed in 20 ms, in which no other thread gets anywhere.
_MAX_HEADER_BYTES = 4 << 20
_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """`start_bytes` is in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start_bytes: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


_Length = Annotated[int, Meta(ge=0, le=1 << 53)]


# The product of many lengths would take minutes to compute, in which no other thread gets anywhere.
_Shape = Annotated[list[_Length], Meta(max_length=8)]


class _Entry(Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: _Shape
    data_offsets: tuple[_Length, _Length]


def read_header(descriptor: int, file_name: str) -> Mapping[str, StoredTensor]:
    """What stands where in the file. Reads none of the numbers, whatever the file claims.

    Raises AdapterError unless the tensors, in float32, float16 or bfloat16, fill the file from end to end.
    """
    size_bytes = _size_bytes(descriptor, file_name)
    length_bytes = int.from_bytes(_read(descriptor, _LENGTH_BYTES, 0, file_name), "little")
    start_bytes = _LENGTH_BYTES + length_bytes
    if length_bytes > _MAX_HEADER_BYTES or start_bytes > size_bytes:
        raise invalid_adapter(
            f"{file_name} is no safetensors file, or is cut off: its header would have {length_bytes:,} bytes, of "
            f"{size_bytes:,} in the file; at most {_MAX_HEADER_BYTES:,} are read"
        )
    entries = _parse(_read(descriptor, length_bytes, _LENGTH_BYTES, file_name), file_name)

    tensors: dict[str, StoredTensor] = {}
    end_bytes = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        if entry.dtype not in _DTYPES:
            raise invalid_adapter(
                f"{file_name}: {quoted(name)} is of type {quoted(entry.dtype)}; float32, float16 and bfloat16 are read"
            )
        tensor = StoredTensor(_DTYPES[entry.dtype], tuple(entry.shape), start_bytes + entry.data_offsets[0])
        first, end = entry.data_offsets
        if first != end_bytes or end - first != tensor.num_bytes:
            raise invalid_adapter(
                f"{file_name}: {quoted(name)} lies from byte {first:,} to {end:,}; its shape {quoted(entry.shape)} has "
                f"{tensor.num_bytes:,} bytes, and those before it end at {end_bytes:,}"
            )
        end_bytes = end
        tensors[name] = tensor
    if start_bytes + end_bytes != size_bytes:
        raise invalid_adapter(
            f"{file_name} has {size_bytes:,} bytes; by its header it should have {start_bytes + end_bytes:,}"
        )
    return tensors


def read_tensor(descriptor: int, tensor: StoredTensor, file_name: str) -> torch.Tensor:
    """Its numbers, in memory of their own. Other threads go on meanwhile. Raises AdapterError if they are gone."""
    values = torch.empty(tensor.shape, dtype=tensor.dtype)
    buffer = memoryview(values.view(-1).view(torch.uint8).numpy())
    _read_into(descriptor, buffer, tensor.start_bytes, file_name)
    return values


def _parse(header: bytes, file_name: str) -> dict[str, _Entry]:
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        raw.pop(_METADATA, None)
        return {name: msgspec.json.decode(entry, type=_Entry) for name, entry in raw.items()}
    except (msgspec.MsgspecError, RecursionError) as error:
        raise invalid_adapter(f"{file_name}: its header is not that of a safetensors file: {error}") from None


def _size_bytes(descriptor: int, file_name: str) -> int:
    try:
        return os.fstat(descriptor).st_size
    except OSError as error:
        raise _unreadable(file_name, error) from None


def _read(descriptor: int, num_bytes: int, at_bytes: int, file_name: str) -> bytes:
    buffer = bytearray(num_bytes)
    _read_into(descriptor, memoryview(buffer), at_bytes, file_name)
    return bytes(buffer)


def _read_into(descriptor: int, buffer: Any, at_bytes: int, file_name: str) -> None:
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(descriptor, [buffer[done:]], at_bytes + done)
        except OSError as error:
            raise _unreadable(file_name, error) from None
        if not count:
            raise invalid_adapter(f"{file_name} is cut off after {at_bytes + done:,} bytes")
        done += count


def _unreadable(file_name: str, error: OSError) -> AdapterError:
    """The disk has failed, or a server of files has lost it."""
    return invalid_adapter(f"{file_name} cannot be read: {error.strerror}")
