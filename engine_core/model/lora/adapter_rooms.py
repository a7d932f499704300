"""Where adapters are kept while they are computed with: a slot in every layer that may have one.

Where C computes, a slot is a pointer to what was packed when the adapter was read. Elsewhere it is part of a tensor on
the device, to which a copy is queued, behind whatever was launched before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Protocol

import torch

from engine_core.model.device_queue import DeviceQueue
from kernels.lora import LoraPart, LoraWeights
from kernels.lora_in_c import PackedLora, pack_lora
from kernels.one_thread import copy_into

_ALIGNMENT_BYTES = 64


class OutputSlice(NamedTuple):
    """Some outputs of a linear layer of the model as transformers has it."""

    path: str
    first: int
    size: int


class AdapterRooms(Protocol):
    """Of several layers."""

    def pack(self, parts: Mapping[str, LoraPart], pause: Callable[[], None]) -> tuple[Any, int]:
        """What `place` takes of an adapter that has these `parts`, by path, and how many bytes that is. Paths of other
        layers are not looked at. Any thread may call this at any time; `pause` is called after every piece of the work.
        """
        ...

    def place(self, slot: int, packed: Any) -> None:
        """From now on `slot` has this adapter in each of the layers."""
        ...

    def clear(self, slot: int) -> None:
        """What is in `slot` is in no step to come: what it keeps in host memory can go."""
        ...


@dataclass(frozen=True, slots=True)
class PointerRoom:
    """A product computed in C: its output is `slices`, one after the other, of layers that transformers may have
    apart. `place` is told a slot.
    """

    slices: Sequence[OutputSlice]
    in_features: int
    dtype: torch.dtype
    place: Callable[[int, PackedLora | None], None]

    def pack(self, parts: Mapping[str, LoraPart]) -> PackedLora | None:
        """None where the adapter leaves it alone."""
        found = [_of_slice(parts.get(each.path), each) for each in self.slices]
        if all(part is None for part in found):
            return None
        return pack_lora(found, [each.size for each in self.slices], self.in_features, self.dtype)


def _of_slice(part: LoraPart | None, of_slice: OutputSlice) -> LoraPart | None:
    if part is None:
        return None
    return LoraPart(part.a, part.b[of_slice.first : of_slice.first + of_slice.size], part.scaling)


class PointerRooms:
    """As `AdapterRooms`."""

    def __init__(self, rooms: Sequence[PointerRoom]) -> None:
        self._rooms = list(rooms)
        self._is_used: dict[int, list[bool]] = {}

    def pack(self, parts: Mapping[str, LoraPart], pause: Callable[[], None]) -> tuple[list[PackedLora | None], int]:
        packed = []
        for room in self._rooms:
            packed.append(room.pack(parts))
            pause()
        return packed, sum(one.num_bytes for one in packed if one is not None)

    def place(self, slot: int, packed: list[PackedLora | None]) -> None:
        used = self._is_used.get(slot, [False] * len(self._rooms))
        # Should this fail, nobody knows how far it got.
        self._is_used[slot] = [True] * len(self._rooms)
        for room, one, is_used in zip(self._rooms, packed, used, strict=True):
            if is_used or one is not None:
                room.place(slot, one)
        self._is_used[slot] = [one is not None for one in packed]

    def clear(self, slot: int) -> None:
        self.place(slot, [None] * len(self._rooms))


@dataclass(frozen=True, slots=True)
class TensorShape:
    """A layer that is to have a room in `TensorRooms`."""

    path: str
    in_features: int
    out_features: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class _InHostMemory:
    """Of one adapter: for each layer A `[rank, in_features]` and B `[out_features, max_rank]`, or None; ranks int32 and
    scaling float32 `[num_layers]`.
    """

    weights: Sequence[tuple[torch.Tensor, torch.Tensor] | None]
    ranks: torch.Tensor
    scaling: torch.Tensor


class TensorRooms:
    """As `AdapterRooms`; all memory on the device is allocated at once. Without a `queue` the device is the host.

    Attributes:
        weights: of each layer, in their order.
    """

    def __init__(
        self,
        shapes: Sequence[TensorShape],
        num_slots: int,
        max_rank: int,
        device: torch.device,
        queue: DeviceQueue | None,
    ) -> None:
        self._shapes, self._max_rank, self._queue = list(shapes), max_rank, queue
        self._ranks = torch.zeros(len(shapes), num_slots, 1, dtype=torch.int32, device=device)
        self._scaling = torch.zeros(len(shapes), num_slots, 1, dtype=torch.float32, device=device)
        self.weights = [
            LoraWeights(
                torch.zeros(num_slots, 1, max_rank, shape.in_features, dtype=shape.dtype, device=device),
                torch.zeros(num_slots, shape.out_features, max_rank, dtype=shape.dtype, device=device),
                ranks,
                scaling,
                (shape.out_features,),
            )
            for shape, ranks, scaling in zip(shapes, self._ranks, self._scaling, strict=True)
        ]

    def pack(self, parts: Mapping[str, LoraPart], pause: Callable[[], None]) -> tuple[_InHostMemory, int]:
        found = [parts.get(shape.path) for shape in self._shapes]
        memory = _HostMemory(self._queue, sum(self._bytes_of(*pair) for pair in zip(self._shapes, found, strict=True)))
        weights: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        for shape, part in zip(self._shapes, found, strict=True):
            if part is None:
                weights.append(None)
                continue
            rank = len(part.a)
            a = memory.take((rank, shape.in_features), shape.dtype)
            b = memory.take((shape.out_features, self._max_rank), shape.dtype)
            copy_into(a, part.a)
            # Whole rows are copied to the device, and what is behind a rank is not read.
            copy_into(b[:, :rank], part.b)
            b[:, rank:].zero_()
            weights.append((a, b))
            pause()
        ranks = memory.take((len(found),), torch.int32)
        ranks.copy_(torch.tensor([0 if part is None else len(part.a) for part in found]))
        scaling = memory.take((len(found),), torch.float32)
        scaling.copy_(torch.tensor([0.0 if part is None else part.scaling for part in found]))
        return _InHostMemory(weights, ranks, scaling), memory.num_bytes

    def place(self, slot: int, packed: _InHostMemory) -> None:
        for of_layer, host in zip(self.weights, packed.weights, strict=True):
            if host is not None:
                a, b = host
                self._copy(of_layer.a[slot, 0, : len(a)], a)
                self._copy(of_layer.b[slot], b)
        self._copy(self._ranks[:, slot, 0], packed.ranks)
        self._copy(self._scaling[:, slot, 0], packed.scaling)

    def clear(self, slot: int) -> None:
        """What is on the device stays there until the next takes its place: it is in nobody's way."""

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self._queue is None:
            target.copy_(source)
        else:
            self._queue.copy(target, source)

    def _bytes_of(self, shape: TensorShape, part: LoraPart | None) -> int:
        """Of one layer in host memory."""
        numbers = 2 * _ALIGNMENT_BYTES
        if part is None:
            return numbers
        sizes = (len(part.a) * shape.in_features, shape.out_features * self._max_rank)
        return numbers + sum(_aligned(size * shape.dtype.itemsize) for size in sizes)


class _HostMemory:
    """One piece, from which the device may copy by itself."""

    def __init__(self, queue: DeviceQueue | None, num_bytes: int) -> None:
        self.num_bytes = num_bytes + 2 * _ALIGNMENT_BYTES
        if queue is None:
            self._memory = torch.empty(self.num_bytes, dtype=torch.uint8)
        else:
            self._memory = queue.host_buffer(self.num_bytes)
        self._taken = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = prod(shape) * dtype.itemsize
        start, self._taken = self._taken, self._taken + _aligned(num_bytes)
        return self._memory[start : start + num_bytes].view(dtype).view(shape)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
