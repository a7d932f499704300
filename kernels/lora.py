"""Multi-LoRA: to each token's result of a linear layer, what the token's own adapter adds.

    shrink    s = A[adapter] · x                              rank values per token, in float32
    expand    y = y + scaling[adapter] · B[adapter] · s       rounded once

A batch may hold any mix of adapters and none: `LoraBatch` has the tokens in tiles of one adapter each, and in a tile
both steps are matrix products. A merged projection (Q, K and V) is several *slices* of one output, each with an A and a
B of its own over the same x, so a slice may have any rank up to the largest there is room for: 0 where an adapter
leaves it alone, and then nothing is read for it.

Shrinking has few results and long sums: one decoded token has but `rank` of them, too few to occupy a GPU. So the sum
over in_features is split among up to `_MAX_SPLITS` programs, and expanding adds up their parts as it reads them, always
in one order: no atomics, the same bits each time. The number of splits follows from shapes only.

Between the steps, s is rounded to the weights' type, as two linear layers would do it; that lets tensor cores expand.
Bytes moved per tile of t tokens, weights of b bytes: b·rank·(in + out) of weights, b·t·(in + 2·out) of tokens.
(Hu et al., "LoRA", 2021; the grouping is Punica's: Chen et al., "Punica: Multi-Tenant LoRA Serving", 2023.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from .dispatch import uses_triton
from .lora_batch import LoraBatch
from .lora_in_c import LoraSlots
from .triton_language import compile_options, dot, jit, next_power_of_2, tl

_COLUMNS = 64
_MAX_SPLITS = 16
# Programs beyond this are no faster: some for each of a large GPU's multiprocessors.
_ENOUGH_PROGRAMS = 512


@dataclass(frozen=True, slots=True, eq=False)
class LoraPart:
    """What an adapter has for one linear layer: `a` `[rank, in_features]`, `b` `[out_features, rank]`, of one type."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """One linear layer's room for adapters, written to in place as adapters come and go.

    Args:
        a: `[num_slots, num_slices, max_rank, in_features]`.
        b: `[num_slots, out_features, max_rank]`, of a's type; the slices' rows follow one another as in the layer.
        ranks: int32 `[num_slots, num_slices]`: how much of `max_rank` an adapter uses. What lies beyond is never read.
        scaling: float32 `[num_slots, num_slices]`.
        slice_sizes: out_features of each slice.

    All of it is contiguous and on one device. Raises ValueError for shapes that do not fit together.

    Attributes:
        column_tiles: int32 `[num_column_tiles, 3]`: slice, first column, number of columns.
    """

    a: torch.Tensor
    b: torch.Tensor
    ranks: torch.Tensor
    scaling: torch.Tensor
    slice_sizes: tuple[int, ...]
    column_tiles: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        num_slots, num_slices, max_rank, _ = self.a.shape
        expected = {
            "b": (self.b, (num_slots, sum(self.slice_sizes), max_rank)),
            "ranks": (self.ranks, (num_slots, num_slices)),
            "scaling": (self.scaling, (num_slots, num_slices)),
        }
        for name, (tensor, shape) in expected.items():
            if tensor.shape != shape:
                raise ValueError(f"{name}: shape {tuple(tensor.shape)}, but a and slice_sizes make it {shape}")
        if len(self.slice_sizes) != num_slices:
            raise ValueError(f"slice_sizes: {len(self.slice_sizes)} of them, but a has {num_slices} slices")
        if self.a.dtype != self.b.dtype:
            raise ValueError(f"b: {self.b.dtype}, but a is {self.a.dtype}")
        tiles: list[tuple[int, int, int]] = []
        begin = 0
        for which, size in enumerate(self.slice_sizes):
            tiles += [(which, begin + first, min(_COLUMNS, size - first)) for first in range(0, size, _COLUMNS)]
            begin += size
        # The class is frozen: this is derived, once.
        object.__setattr__(self, "column_tiles", torch.tensor(tiles, dtype=torch.int32, device=self.a.device))


def add_lora(output: torch.Tensor, x: torch.Tensor, weights: LoraWeights | LoraSlots, batch: LoraBatch) -> None:
    """Add to `output` `[num_tokens, out_features]`, in place, what each token's adapter makes of `x`
    `[num_tokens, in_features]`, which is of the weights' type. Rows of tokens without an adapter keep their bits.

    Only the last dimensions need to be contiguous. `LoraSlots` are computed in C, see `LoraSlots.add`.

    Raises:
        ValueError: they are not.
    """
    if isinstance(weights, LoraSlots):
        weights.add(output, x, batch)
        return
    for name, tensor in (("output", output), ("x", x)):
        if tensor.stride(-1) != 1 < tensor.shape[-1]:
            raise ValueError(f"{name}: expected contiguous rows, got strides {tensor.stride()}")
    compute = _launch if uses_triton(x) else reference
    compute(output, x, weights, batch)


def reference(output: torch.Tensor, x: torch.Tensor, weights: LoraWeights, batch: LoraBatch) -> None:
    """As `add_lora`, in torch: one adapter after the other."""
    ranks, scaling = weights.ranks.tolist(), weights.scaling.tolist()
    slices = output.split(weights.slice_sizes, dim=1)
    for adapter, start, end in batch.segments:
        rows = batch.rows[start:end]
        of_adapter = x[rows]
        b = weights.b[adapter].split(weights.slice_sizes)
        for which, rank in enumerate(ranks[adapter]):
            if rank:
                shrunk = F.linear(of_adapter, weights.a[adapter, which, :rank])
                added = F.linear(shrunk, b[which][:, :rank]).float() * scaling[adapter][which]
                slices[which][rows] = (slices[which][rows].float() + added).to(output.dtype)


def shrink_options(max_rank: int, tile_tokens: int, element_bytes: int) -> dict[str, Any]:
    """Constants and compile options of the first step, for weights of `element_bytes` bytes a value."""
    inner = 64 if element_bytes == 2 else 32
    return {"TOKENS": tile_tokens, "INNER": inner, **_rank_options(max_rank, element_bytes, num_stages=3)}


def expand_options(max_rank: int, tile_tokens: int, element_bytes: int) -> dict[str, Any]:
    """Constants and compile options of the second step."""
    return {"TOKENS": tile_tokens, "COLUMNS": _COLUMNS, **_rank_options(max_rank, element_bytes, num_stages=2)}


def _rank_options(max_rank: int, element_bytes: int, num_stages: int) -> dict[str, Any]:
    # As much as registers hold.
    ranks = min(64 if element_bytes == 2 else 32, max(16, next_power_of_2(max_rank)))
    return {"RANKS": ranks, **compile_options(num_warps=8 if ranks == 64 else 4, num_stages=num_stages)}


def _launch(output: torch.Tensor, x: torch.Tensor, weights: LoraWeights, batch: LoraBatch) -> None:
    _, num_slices, max_rank, in_features = weights.a.shape
    num_tiles, num_rows = len(batch.tiles), len(batch.rows)
    if not num_tiles:
        return
    options = shrink_options(max_rank, batch.tile_tokens, x.element_size())
    rank_blocks = -(-max_rank // options["RANKS"])
    num_splits = _num_splits(num_tiles * num_slices * rank_blocks, in_features, options["INNER"])
    shrunk = torch.empty((num_splits, num_rows, num_slices, max_rank), dtype=torch.float32, device=x.device)
    shrink_kernel[(num_tiles, num_slices * rank_blocks, num_splits)](
        *(shrunk, x, weights.a, weights.ranks, batch.rows, batch.tiles),
        *(x.stride(0), num_rows, num_slices, max_rank, in_features, num_splits),
        **options,
    )
    expand_kernel[(num_tiles, len(weights.column_tiles))](
        *(output, shrunk, weights.b, weights.ranks, weights.scaling, batch.rows, batch.tiles, weights.column_tiles),
        *(output.stride(0), num_rows, num_slices, max_rank, weights.b.shape[1], num_splits),
        **expand_options(max_rank, batch.tile_tokens, x.element_size()),
    )


def _num_splits(num_programs: int, in_features: int, inner: int) -> int:
    """Into how many parts a sum is split: enough to occupy a GPU, none so short that starting it is most of it."""
    return max(1, min(_ENOUGH_PROGRAMS // num_programs, in_features // (4 * inner), _MAX_SPLITS))


@jit
def shrink_kernel(  # type: ignore[no-untyped-def]
    shrunk,
    x,
    a,
    ranks,
    rows,
    tiles,
    x_stride,
    num_rows,
    num_slices,
    max_rank,
    in_features,
    num_splits,
    TOKENS: tl.constexpr,
    RANKS: tl.constexpr,
    INNER: tl.constexpr,
):
    tile = tiles + tl.program_id(0) * 3
    adapter, first, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    which = tl.program_id(1) % num_slices
    rank_places = tl.program_id(1) // num_slices * RANKS + tl.arange(0, RANKS)
    split = tl.program_id(2)

    rank = tl.load(ranks + adapter * num_slices + which)
    # Nothing is left of a tile that only fills the table up, or of ranks the adapter does not have.
    if (count > 0) & (tl.program_id(1) // num_slices * RANKS < rank):
        places = tl.arange(0, TOKENS)
        token = tl.load(rows + first + places, mask=places < count, other=0).to(tl.int64)
        weight = a + ((adapter * num_slices + which).to(tl.int64) * max_rank + rank_places) * in_features
        per_split = tl.cdiv(tl.cdiv(in_features, INNER), num_splits) * INNER
        total = tl.zeros((TOKENS, RANKS), tl.float32)
        for begin in range(split * per_split, min(in_features, (split + 1) * per_split), INNER):
            inner = begin + tl.arange(0, INNER)
            values = tl.load(
                x + token[:, None] * x_stride + inner[None, :],
                mask=(places < count)[:, None] & (inner < in_features)[None, :],
                other=0.0,
            )
            factors = tl.load(
                weight[None, :] + inner[:, None],
                mask=(rank_places < rank)[None, :] & (inner < in_features)[:, None],
                other=0.0,
            )
            total = dot(values, factors, total)
        row = (split * num_rows + first + places).to(tl.int64)
        tl.store(
            shrunk + (row * num_slices + which)[:, None] * max_rank + rank_places[None, :],
            total,
            mask=(places < count)[:, None] & (rank_places < rank)[None, :],
        )


@jit
def expand_kernel(  # type: ignore[no-untyped-def]
    output,
    shrunk,
    b,
    ranks,
    scaling,
    rows,
    tiles,
    column_tiles,
    output_stride,
    num_rows,
    num_slices,
    max_rank,
    out_features,
    num_splits,
    TOKENS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tile = tiles + tl.program_id(0) * 3
    adapter, first, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    column_tile = column_tiles + tl.program_id(1) * 3
    which, first_column, num_columns = tl.load(column_tile), tl.load(column_tile + 1), tl.load(column_tile + 2)

    rank = tl.load(ranks + adapter * num_slices + which)
    if (count > 0) & (rank > 0):
        places = tl.arange(0, TOKENS)
        lanes = tl.arange(0, COLUMNS)
        columns = first_column + lanes
        weight = b + (adapter.to(tl.int64) * out_features + columns) * max_rank
        total = tl.zeros((TOKENS, COLUMNS), tl.float32)
        for begin in range(0, rank, RANKS):
            rank_places = begin + tl.arange(0, RANKS)
            has_value = (places < count)[:, None] & (rank_places < rank)[None, :]
            values = tl.zeros((TOKENS, RANKS), tl.float32)
            for split in range(num_splits):
                row = (split * num_rows + first + places).to(tl.int64)
                part = (row * num_slices + which)[:, None] * max_rank + rank_places[None, :]
                values += tl.load(shrunk + part, mask=has_value, other=0.0)
            factors = tl.load(
                weight[None, :] + rank_places[:, None],
                mask=(lanes < num_columns)[None, :] & (rank_places < rank)[:, None],
                other=0.0,
            )
            total = dot(values.to(b.dtype.element_ty), factors, total)
        token = tl.load(rows + first + places, mask=places < count, other=0).to(tl.int64)
        target = output + token[:, None] * output_stride + columns[None, :]
        inside = (places < count)[:, None] & (lanes < num_columns)[None, :]
        before = tl.load(target, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(scaling + adapter * num_slices + which)
        tl.store(target, before + total * factor, mask=inside)
