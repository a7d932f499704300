"""Blocks and parts of blocks, copied within the pool, out of it and into it.

A pool is a list of caches `[num_blocks, block_size, ...]`, two for each layer, of any shapes and types behind that; a
block is one row of all of them. Four functions move the same thing, the first slots of a block: from block to block
(`copy_blocks`, `copy_slots`), to a row of a buffer (`gather_blocks`) and back (`scatter_blocks`). A row of a buffer is
the block's bytes, cache after cache in the order of the list, without gaps: what is cheap to send, to store, to hash.

So there is one kernel. For every cache it reads from a table where its rows start and how far apart they are, at either
end, and how large a slot is; for every copy the two rows and how many slots. The table holds addresses as numbers,
because a launch takes only so many tensors: one launch for all layers instead of a hundred, each too small to be worth
it. Nothing but bytes is moved, as integers of the widest type that divides all sizes and addresses, 16 bytes at a time
where possible. An address may be one of pinned host memory, which a GPU reads and writes through the bus.

Bytes moved per copy: a block's, in and out. A program has 8 KiB of one cache of one copy.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from .dispatch import uses_triton
from .triton_language import compile_options, jit, tl

_PROGRAM_BYTES = 8192
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def copy_blocks(caches: Sequence[torch.Tensor], sources: Sequence[int], targets: Sequence[int]) -> None:
    """Copy block `sources[i]` to block `targets[i]`, in every cache. Every source is read before any target is written.

    Raises:
        ValueError: targets are not distinct, an id is none of the pool's, or the caches are not those of one pool.
    """
    copy_slots(caches, sources, targets, [caches[0].shape[1]] * len(sources))


def copy_slots(
    caches: Sequence[torch.Tensor], sources: Sequence[int], targets: Sequence[int], counts: Sequence[int]
) -> None:
    """As `copy_blocks`, but of each block the first `counts[i]` slots only; the target's others stay as they are.

    Raises:
        ValueError: as `copy_blocks`; or a count is not within a block.
    """
    _check_pool(caches)
    _check_ids(caches, "sources", sources)
    _check_ids(caches, "targets", targets)
    if not len(sources) == len(targets) == len(counts):
        raise ValueError(f"{len(sources)} sources, {len(targets)} targets and {len(counts)} counts do not go together")
    if len(set(targets)) != len(targets):
        raise ValueError("targets: a block is copied to twice")
    for count in counts:
        if not 0 <= count <= caches[0].shape[1]:
            raise ValueError(f"counts: a block has {caches[0].shape[1]} slots, not {count}")
    if not sources:
        return
    apart = set(sources).isdisjoint(targets)
    if not uses_triton(caches[0]):
        compute = _copy_in_memory if apart and caches[0].device.type == "cpu" else reference
        compute(caches, sources, targets, counts)
    elif apart:
        pool = _ends_in_pool(caches)
        _launch(pool, pool, caches, sources, targets, counts)
    else:
        # Programs run in any order: what one reads, another may have written.
        scratch = torch.empty(len(sources), block_bytes(caches), dtype=torch.uint8, device=caches[0].device)
        pool, buffer, rows = _ends_in_pool(caches), _ends_in_buffer(caches, scratch), range(len(sources))
        _launch(pool, buffer, caches, sources, rows, counts)
        _launch(buffer, pool, caches, rows, targets, counts)


def gather_blocks(caches: Sequence[torch.Tensor], block_ids: Sequence[int], buffer: torch.Tensor) -> None:
    """Copy the blocks to the rows of `buffer` `[len(block_ids), block_bytes(caches)]` uint8.

    Rows may lie further apart than they are long. On a GPU this happens on the current stream, and into pinned host
    memory without anyone waiting: it is there when the stream has come this far.

    Raises:
        ValueError: an id is none of the pool's, `buffer` has another shape or type, or the caches are not of one pool.
    """
    _check_transfer(caches, block_ids, buffer)
    if not block_ids:
        return
    if uses_triton(caches[0]) and _is_within_reach(buffer, caches[0].device):
        ends, counts = _ends_in_pool(caches), [caches[0].shape[1]] * len(block_ids)
        _launch(ends, _ends_in_buffer(caches, buffer), caches, block_ids, range(len(block_ids)), counts)
    else:
        gather_reference(caches, block_ids, buffer)


def scatter_blocks(buffer: torch.Tensor, block_ids: Sequence[int], caches: Sequence[torch.Tensor]) -> None:
    """Copy the rows of `buffer`, which `gather_blocks` filled, to the blocks. No two are the same.

    On a GPU this happens on the current stream; pinned host memory must stay as it is until the stream has come this
    far.

    Raises:
        ValueError: as `gather_blocks`; or ids are not distinct.
    """
    _check_transfer(caches, block_ids, buffer)
    if len(set(block_ids)) != len(block_ids):
        raise ValueError("block_ids: a block is copied to twice")
    if not block_ids:
        return
    if uses_triton(caches[0]) and _is_within_reach(buffer, caches[0].device):
        ends, counts = _ends_in_pool(caches), [caches[0].shape[1]] * len(block_ids)
        _launch(_ends_in_buffer(caches, buffer), ends, caches, range(len(block_ids)), block_ids, counts)
    else:
        scatter_reference(buffer, block_ids, caches)


def block_bytes(caches: Sequence[torch.Tensor]) -> int:
    """Bytes of one block in all caches."""
    return sum(_block_bytes(caches))


def reference(
    caches: Sequence[torch.Tensor], sources: Sequence[int], targets: Sequence[int], counts: Sequence[int]
) -> None:
    """As `copy_slots`, in torch."""
    block_size, device = caches[0].shape[1], caches[0].device
    whole = all(count == block_size for count in counts)
    read, written = (
        torch.tensor(blocks if whole else _slots(blocks, counts, block_size), dtype=torch.int64, device=device)
        for blocks in (sources, targets)
    )
    for cache in caches:
        rows = (cache if whole else cache.flatten(0, 1)).view(_INTEGERS[cache.itemsize])
        rows.index_copy_(0, written, rows.index_select(0, read))


def gather_reference(caches: Sequence[torch.Tensor], block_ids: Sequence[int], buffer: torch.Tensor) -> None:
    """As `gather_blocks`, in torch."""
    ids = torch.tensor(block_ids, dtype=torch.int64, device=caches[0].device)
    for rows, part in _rows_and_parts(caches, buffer):
        part.copy_(rows.index_select(0, ids))


def scatter_reference(buffer: torch.Tensor, block_ids: Sequence[int], caches: Sequence[torch.Tensor]) -> None:
    """As `scatter_blocks`, in torch."""
    ids = torch.tensor(block_ids, dtype=torch.int64, device=caches[0].device)
    for rows, part in _rows_and_parts(caches, buffer):
        rows.index_copy_(0, ids, part.to(rows.device))


def launch_options(width_bytes: int) -> dict[str, Any]:
    """Constants and compile options where 1, 2, 4, 8 or 16 bytes divide every size and address."""
    element_bytes = min(width_bytes, 8)
    return {
        "ELEMENT": {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}[element_bytes],
        "IN_PAIRS": width_bytes == 16,
        "BLOCK": _PROGRAM_BYTES // element_bytes,
        **compile_options(num_warps=4),
    }


def _copy_in_memory(
    caches: Sequence[torch.Tensor], sources: Sequence[int], targets: Sequence[int], counts: Sequence[int]
) -> None:
    """As `reference`, for a few blocks of many caches: what torch needs to begin with takes longer than the copying."""
    for cache, bytes_of_block in zip(caches, _block_bytes(caches), strict=True):
        start, slot_bytes = cache.data_ptr(), bytes_of_block // cache.shape[1]
        for source, target, count in zip(sources, targets, counts, strict=True):
            ctypes.memmove(start + target * bytes_of_block, start + source * bytes_of_block, count * slot_bytes)


@dataclass(frozen=True, slots=True)
class _Ends:
    """One end of copies: of each cache, the address of row 0 and the bytes from row to row."""

    addresses: list[int]
    strides: list[int]


def _ends_in_pool(caches: Sequence[torch.Tensor]) -> _Ends:
    return _Ends([cache.data_ptr() for cache in caches], _block_bytes(caches))


def _ends_in_buffer(caches: Sequence[torch.Tensor], buffer: torch.Tensor) -> _Ends:
    starts = accumulate(_block_bytes(caches)[:-1], initial=buffer.data_ptr())
    return _Ends(list(starts), [buffer.stride(0)] * len(caches))


def _launch(
    source: _Ends,
    target: _Ends,
    caches: Sequence[torch.Tensor],
    source_rows: Sequence[int],
    target_rows: Sequence[int],
    counts: Sequence[int],
) -> None:
    slot_bytes = [size // caches[0].shape[1] for size in _block_bytes(caches)]
    in_bytes = (source.strides, target.strides, slot_bytes)
    width = math.gcd(16, *source.addresses, *target.addresses, *(value for values in in_bytes for value in values))
    options = launch_options(width)
    in_elements = [[value // min(width, 8) for value in values] for values in in_bytes]
    table = np.array([source.addresses, target.addresses, *in_elements], dtype=np.int64).T
    copies = np.array([source_rows, target_rows, counts], dtype=np.int64).T
    numbers = torch.from_numpy(np.concatenate([table.ravel(), copies.ravel()])).to(caches[0].device)
    num_chunks = -(-max(counts) * max(slot_bytes) // _PROGRAM_BYTES)
    if num_chunks:
        copy_blocks_kernel[(len(copies), len(caches), num_chunks)](numbers, numbers[table.size :], **options)


@jit
def copy_blocks_kernel(table, copies, ELEMENT: tl.constexpr, IN_PAIRS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """`table` `[num_caches, 5]`: both addresses; both strides and the size of a slot, in elements. `copies`
    `[num_copies, 3]`: both rows, and how many slots. int64 both.
    """
    copies += tl.program_id(0) * 3
    table += tl.program_id(1) * 5
    source = tl.load(table).to(tl.pointer_type(ELEMENT)) + tl.load(copies) * tl.load(table + 2)
    target = tl.load(table + 1).to(tl.pointer_type(ELEMENT)) + tl.load(copies + 1) * tl.load(table + 3)
    num_elements = tl.load(copies + 2) * tl.load(table + 4)
    if IN_PAIRS:
        # Nothing in the table tells the compiler that it may move two elements at a time.
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
        num_elements = tl.multiple_of(num_elements, 2)
    places = tl.program_id(2).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < num_elements
    tl.store(target + places, tl.load(source + places, mask=inside), mask=inside)


def _block_bytes(caches: Sequence[torch.Tensor]) -> list[int]:
    """Of each cache."""
    return [math.prod(cache.shape[1:]) * cache.itemsize for cache in caches]


def _slots(blocks: Sequence[int], counts: Sequence[int], block_size: int) -> list[int]:
    return [block * block_size + slot for block, count in zip(blocks, counts, strict=True) for slot in range(count)]


def _rows_and_parts(
    caches: Sequence[torch.Tensor], buffer: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each cache and its columns of `buffer`, a block to a row, as integers as wide as both can be seen as."""
    sizes = _block_bytes(caches)
    offsets = (cache.storage_offset() * cache.itemsize for cache in caches)
    width = math.gcd(8, *sizes, *offsets, buffer.storage_offset(), buffer.stride(0))
    parts = buffer.view(_INTEGERS[width]).split([size // width for size in sizes], dim=1)
    for cache, part in zip(caches, parts, strict=True):
        yield cache.flatten(1).view(_INTEGERS[width]), part


def _is_within_reach(buffer: torch.Tensor, device: torch.device) -> bool:
    return buffer.device == device or (buffer.device.type == "cpu" and buffer.is_pinned())


def _check_pool(caches: Sequence[torch.Tensor]) -> None:
    for cache in caches:
        if cache.shape[:2] != caches[0].shape[:2] or cache.device != caches[0].device or not cache.is_contiguous():
            raise ValueError(
                f"caches: {tuple(cache.shape)} on {cache.device} is not of one pool with {tuple(caches[0].shape)} on"
                f" {caches[0].device}, or not contiguous"
            )


def _check_ids(caches: Sequence[torch.Tensor], name: str, block_ids: Sequence[int]) -> None:
    for block_id in block_ids:
        if not 0 <= block_id < len(caches[0]):
            raise ValueError(f"{name}: the pool has {len(caches[0])} blocks, none is {block_id}")


def _check_transfer(caches: Sequence[torch.Tensor], block_ids: Sequence[int], buffer: torch.Tensor) -> None:
    _check_pool(caches)
    _check_ids(caches, "block_ids", block_ids)
    shape = (len(block_ids), block_bytes(caches))
    if buffer.dtype != torch.uint8 or buffer.shape != shape or buffer.stride(-1) != 1:
        raise ValueError(
            f"buffer: {len(block_ids)} blocks need {shape} contiguous rows of uint8, not {tuple(buffer.shape)} of"
            f" {buffer.dtype}"
        )
