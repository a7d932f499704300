"""LoRA on CPUs: `cpu/lora.c`. Adapters are packed once, and a slot holds a pointer: to change it copies nothing.

What adapters add to a linear layer of its own is `add`; decoder layers add it within their products (`decoder_layers`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from .compiled import INPUTS_PER_STEP, PANEL, library
from .lora_batch import LoraBatch
from .one_thread import copy_into

if TYPE_CHECKING:
    from .lora import LoraPart

# As in cpu/lora.h.
_RANK_PANEL = 16
_BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


class _CSlice(ctypes.Structure):
    """`LoraSlice` of cpu/lora.h."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("first_panel", ctypes.c_int64),
        ("end_panel", ctypes.c_int64),
        ("first_rank", ctypes.c_int64),
        ("rank", ctypes.c_int64),
    )


class _CLora(ctypes.Structure):
    """`Lora` of cpu/lora.h."""

    _fields_ = (
        ("rank_panels", ctypes.c_void_p),
        ("scaling", ctypes.c_void_p),
        ("num_rank_panels", ctypes.c_int64),
        ("slices", ctypes.POINTER(_CSlice)),
        ("num_slices", ctypes.c_int64),
    )


class CLoraBatch(ctypes.Structure):
    """`LoraBatch` of cpu/lora.h."""

    _fields_ = (
        ("slots", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("tiles", ctypes.c_void_p),
        ("num_tiles", ctypes.c_int64),
        ("shrunk", ctypes.c_void_p),
        ("shrunk_stride", ctypes.c_int64),
    )


class _CAddition(ctypes.Structure):
    """`LoraAddition` of cpu/lora.h."""

    _fields_ = (
        ("adapters", ctypes.c_void_p),
        ("batch", ctypes.POINTER(CLoraBatch)),
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("y", ctypes.c_void_p),
        ("y_stride", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("rows", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True, eq=False)
class PackedLora:
    """What an adapter has for one linear layer, in the order in which C reads it; made by `pack_lora`.

    Attributes:
        rank: of all slices together.
        tensors: what `on_c_side` points into. That lives as long as this.
    """

    dtype: torch.dtype
    in_features: int
    out_features: int
    rank: int
    tensors: tuple[torch.Tensor, ...] = field(repr=False)
    on_c_side: _CLora = field(repr=False)

    @property
    def shrunk_size(self) -> int:
        """How many values a token is shrunk to, with those that fill up the last panel."""
        return -(-self.rank // _RANK_PANEL) * _RANK_PANEL

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def is_available(dtype: torch.dtype) -> bool:
    """Whether there is a library for this CPU that computes in `dtype`."""
    return library(dtype) is not None


def pack_lora(
    parts: Sequence[LoraPart | None], slice_sizes: Sequence[int], in_features: int, dtype: torch.dtype
) -> PackedLora:
    """A copy of what an adapter has for a linear layer whose output is slices of `slice_sizes`, one after the other:
    for each its part, or None where it leaves it alone. Rounded to `dtype`, bfloat16 or float32.

    Needs no library, and copies in this thread only.

    Raises:
        ValueError: a part has other shapes.
    """
    present: list[tuple[LoraPart, int]] = []  # with the slice's first output
    first = 0
    for part, size in zip(parts, slice_sizes, strict=True):
        if part is not None:
            rank = len(part.a)
            if part.a.shape != (rank, in_features) or part.b.shape != (size, rank):
                raise ValueError(
                    f"a is {list(part.a.shape)} and b {list(part.b.shape)} where {in_features} inputs"
                    f" and {size} outputs make them [rank, {in_features}] and [{size}, rank]"
                )
            present.append((part, first))
        first += size
    rank = sum(len(part.a) for part, _ in present)

    shrinking = _panels([(part.a, at) for part, at in _by_rank(present)], rank, in_features, _RANK_PANEL, dtype)
    scaling = torch.zeros(-(-rank // _RANK_PANEL) * _RANK_PANEL)
    tensors, slices = [shrinking, scaling], (_CSlice * len(present))()
    for (part, at), (_, first_rank), on_c_side in zip(present, _by_rank(present), slices, strict=True):
        size, of_slice = part.b.shape
        scaling[first_rank : first_rank + of_slice] = part.scaling
        # A slice need not begin where a panel does: what else is in its panels is zero.
        panels = _panels([(part.b, at % PANEL)], at % PANEL + size, of_slice, PANEL, dtype)
        first_panel = at // PANEL
        tensors.append(panels)
        on_c_side.panels, on_c_side.first_panel = panels.data_ptr(), first_panel
        on_c_side.end_panel = first_panel + len(panels)
        on_c_side.first_rank, on_c_side.rank = first_rank, of_slice
    on_c_side = _CLora(shrinking.data_ptr(), scaling.data_ptr(), len(shrinking), slices, len(present))
    return PackedLora(dtype, in_features, first, rank, tuple(tensors), on_c_side)


def _by_rank(present: Sequence[tuple[LoraPart, int]]) -> list[tuple[LoraPart, int]]:
    """Each part with its first place among the values a token is shrunk to."""
    ends = np.cumsum([0, *(len(part.a) for part, _ in present)]).tolist()
    return [(part, at) for (part, _), at in zip(present, ends, strict=False)]


def _panels(
    rows: Sequence[tuple[torch.Tensor, int]], num_rows: int, num_inputs: int, panel: int, dtype: torch.dtype
) -> torch.Tensor:
    """`[num_panels, num_steps, panel, inputs_per_step]` of some rows and the place of the first, zero elsewhere."""
    per_step = INPUTS_PER_STEP[dtype]
    num_panels, num_steps = -(-num_rows // panel), -(-num_inputs // per_step)
    packed = torch.empty((num_panels, num_steps, panel, per_step), dtype=dtype)
    flat = np.zeros((num_panels * panel, num_steps * per_step), _numpy(packed).dtype)
    for values, at in rows:
        rounded = torch.empty(values.shape, dtype=dtype)
        copy_into(rounded, values.detach())
        flat[at : at + len(values), :num_inputs] = _numpy(rounded)
    # By numpy, for the same reason.
    np.copyto(_numpy(packed), flat.reshape(num_panels, panel, num_steps, per_step).transpose(0, 2, 1, 3))
    return packed


def _numpy(x: torch.Tensor) -> np.ndarray:
    """Its bits, since numpy has no bfloat16."""
    return x.view(_BITS[x.dtype]).numpy()


class LoraSlots:
    """One linear layer's room for adapters: `num_slots` of them, each packed for it.

    Raises:
        RuntimeError: there is no library for `dtype`.
    """

    def __init__(self, num_slots: int, in_features: int, out_features: int, dtype: torch.dtype) -> None:
        found = library(dtype)
        if found is None:
            raise RuntimeError(f"there are no LoRA kernels for {dtype} on this CPU")
        self.in_features, self.out_features, self.dtype = in_features, out_features, dtype
        self._library = found
        self._adapters: list[PackedLora | None] = [None] * num_slots
        self.on_c_side = (ctypes.POINTER(_CLora) * num_slots)()

    def place(self, slot: int, packed: PackedLora | None) -> None:
        """From now on `slot` has this, or nothing. No step may be computed meanwhile.

        Raises:
            ValueError: it is for another layer.
        """
        if packed is not None and (packed.in_features, packed.out_features, packed.dtype) != (
            self.in_features,
            self.out_features,
            self.dtype,
        ):
            raise ValueError(
                f"an adapter of {packed.in_features} inputs and {packed.out_features} outputs of {packed.dtype} is not"
                f" for {self.in_features} and {self.out_features} of {self.dtype}"
            )
        self._adapters[slot] = packed
        if packed is None:
            self.on_c_side[slot] = ctypes.POINTER(_CLora)()
        else:
            self.on_c_side[slot] = ctypes.pointer(packed.on_c_side)

    @property
    def shrunk_size(self) -> int:
        """The largest of its adapters'."""
        return max((packed.shrunk_size for packed in self._adapters if packed is not None), default=0)

    def add(self, output: torch.Tensor, x: torch.Tensor, batch: LoraBatch) -> None:
        """As `kernels.lora.add_lora`; `output` and `x` are on the CPU and of the weights' type. Sums are in float32,
        and a row's result does not depend on the others. Runs in torch's intra-op threads.

        Raises:
            ValueError: these do not fit each other.
        """
        num_rows = len(batch.slots)
        for name, tensor, size in (("output", output, self.out_features), ("x", x, self.in_features)):
            is_readable = tensor.is_cpu and tensor.dtype is self.dtype and (size == 1 or tensor.stride(-1) == 1)
            if tensor.shape != (num_rows, size) or not is_readable:
                raise ValueError(
                    f"{name}: expected {self.dtype} [{num_rows}, {size}] with contiguous rows on the CPU,"
                    f" got {tensor.dtype} {list(tensor.shape)} on {tensor.device.type}"
                )
        if max(batch.slots_in_use, default=-1) >= len(self._adapters):
            raise ValueError(f"there are {len(self._adapters)} slots, but adapters in {batch.slots_in_use}")
        size = self.shrunk_size
        if not size:
            return
        shrunk = torch.empty(num_rows * size, dtype=self.dtype)
        addition = _CAddition(
            ctypes.addressof(self.on_c_side),
            ctypes.pointer(on_c_side(batch, shrunk, size)),
            *(x.data_ptr(), x.stride(0), self.in_features),
            *(output.data_ptr(), output.stride(0), self.out_features),
            num_rows,
        )
        self._library.add_lora(ctypes.byref(addition), torch.get_num_threads())


def on_c_side(batch: LoraBatch, shrunk: torch.Tensor, shrunk_stride: int) -> CLoraBatch:
    """With room for what its tokens are shrunk to: `shrunk_stride` values each. Valid while both live."""
    return CLoraBatch(
        batch.slots.data_ptr(),
        batch.rows.data_ptr(),
        batch.tiles.data_ptr(),
        len(batch.tiles),
        shrunk.data_ptr(),
        shrunk_stride,
    )
