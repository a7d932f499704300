"""Blocks copied within a pool, out of it and into it: in Triton's interpreter and in torch."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

import kernels.copy_blocks
from kernels.copy_blocks import block_bytes, copy_blocks, copy_slots, gather_blocks, scatter_blocks
from kernels.dispatch import computed_by
from tests.kernels.interpreted import poisoned

BACKENDS = pytest.mark.parametrize("backend", ["triton", "torch"])
NUM_BLOCKS, BLOCK_SIZE = 7, 4

# What lies in a slot of each cache. The name says which is the widest integer that divides all of it.
POOLS: dict[str, list[tuple[tuple[int, ...], torch.dtype]]] = {
    "16 bytes": [((2, 64), torch.bfloat16), ((2, 128), torch.bfloat16), ((1, 80), torch.float32)],
    "8 bytes": [((1, 6), torch.float32), ((2, 8), torch.float16)],
    "4 bytes": [((3, 1), torch.float32), ((1, 6), torch.bfloat16)],
    "2 bytes": [((1, 3), torch.bfloat16), ((1, 3), torch.bfloat16)],
    "1 byte": [((1, 5), torch.float8_e4m3fn), ((3, 64), torch.float16), ((1, 7), torch.int8)],
    "more than a program": [((9, 300), torch.float32), ((1, 4), torch.float32)],
}


def make_pool(name: str) -> list[torch.Tensor]:
    """Random bits, NaN among them."""
    return [
        torch.randint(
            0, 256, (NUM_BLOCKS, BLOCK_SIZE, *shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8
        ).view(dtype)
        for shape, dtype in POOLS[name]
    ]


def as_bytes(pool: list[torch.Tensor]) -> torch.Tensor:
    """`[NUM_BLOCKS, BLOCK_SIZE, bytes of a slot]`, a copy."""
    return torch.cat([cache.flatten(2).view(torch.uint8) for cache in pool], dim=2)


def moved(before: torch.Tensor, copies: list[tuple[int, int, int]]) -> torch.Tensor:
    """What `as_bytes` is after copies `(source, target, count)`, each of which read what was there at first."""
    after = before.clone()
    for source, target, count in copies:
        after[target, :count] = before[source, :count]
    return after


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize(
    "copies",
    [[(1, 6)], [(1, 6), (3, 2), (1, 5)], [(0, 1), (1, 2), (2, 0), (4, 4)], []],
    ids=["one", "one source twice", "a circle", "none"],
)
@BACKENDS
def test_every_source_is_read_before_any_target_is_written(
    backend: str, copies: list[tuple[int, int]], name: str
) -> None:
    pool = make_pool(name)
    before = as_bytes(pool)
    with computed_by(backend):
        copy_blocks(pool, [source for source, _ in copies], [target for _, target in copies])
    expected = moved(before, [(source, target, BLOCK_SIZE) for source, target in copies])
    assert torch.equal(as_bytes(pool), expected)


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize(
    "copies",
    [[(1, 6, 1)], [(1, 6, 3), (3, 2, 4), (1, 5, 0)], [(0, 1, 2), (1, 0, 3)], [(0, 1, 0)]],
    ids=["one slot", "different counts", "a circle", "nothing of it"],
)
@BACKENDS
def test_a_blocks_first_slots_alone(backend: str, copies: list[tuple[int, int, int]], name: str) -> None:
    pool = make_pool(name)
    before = as_bytes(pool)
    with computed_by(backend):
        copy_slots(pool, *(list(column) for column in zip(*copies, strict=True)))
    assert torch.equal(as_bytes(pool), moved(before, copies))


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("gap_bytes", [0, 1, 48])
@BACKENDS
def test_out_of_a_pool_and_into_another(backend: str, gap_bytes: int, name: str) -> None:
    pool, other = make_pool(name), make_pool(name)
    before, other_before = as_bytes(pool), as_bytes(other)
    out, into = random.choices(range(NUM_BLOCKS), k=3), random.sample(range(NUM_BLOCKS), 3)
    wide = poisoned(3, block_bytes(pool) + gap_bytes, dtype=torch.uint8)
    buffer = wide[:, : block_bytes(pool)]
    with computed_by(backend):
        gather_blocks(pool, out, buffer)
        scatter_blocks(buffer, into, other)
    # Cache after cache, each as it lies in the pool.
    rows = [torch.cat([cache[block].flatten().view(torch.uint8) for cache in pool]) for block in out]
    assert torch.equal(buffer, torch.stack(rows))
    assert (wide[:, block_bytes(pool) :] == 255).all()
    assert torch.equal(as_bytes(pool), before)
    other_before[into] = before[out]
    assert torch.equal(as_bytes(other), other_before)


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each launch took for granted to divide everything: a GPU fails at an address they do not."""
    seen: list[int] = []
    launch_options = kernels.copy_blocks.launch_options
    monkeypatch.setattr(
        kernels.copy_blocks, "launch_options", lambda width: seen.append(width) or launch_options(width)
    )
    return seen


@pytest.mark.parametrize("name", POOLS)
def test_bytes_are_moved_as_the_widest_integers(name: str, widths: list[int]) -> None:
    with computed_by("triton"):
        copy_blocks(make_pool(name), [1], [2])
    assert widths == [16 if name == "more than a program" else int(name.split(maxsplit=1)[0])]


@BACKENDS
def test_a_pool_and_a_buffer_at_odd_addresses(backend: str, widths: list[int]) -> None:
    memory = torch.randint(0, 256, (4 + NUM_BLOCKS * BLOCK_SIZE * 16,), dtype=torch.uint8)
    pool = [memory[4:].view(NUM_BLOCKS, BLOCK_SIZE, 1, 16)]
    before, buffer = as_bytes(pool), torch.zeros(3 + 2 * 64, dtype=torch.uint8)[3:].view(2, 64)
    with computed_by(backend):
        copy_blocks(pool, [0], [2])
        gather_blocks(pool, [2, 1], buffer)
    assert torch.equal(as_bytes(pool), moved(before, [(0, 2, BLOCK_SIZE)]))
    assert torch.equal(buffer.view(2, BLOCK_SIZE, 16), before[[0, 1]])
    assert widths == ([4, 1] if backend == "triton" else [])


@BACKENDS
def test_no_blocks(backend: str) -> None:
    pool = make_pool("1 byte")
    before = as_bytes(pool)
    buffer = torch.empty(0, block_bytes(pool), dtype=torch.uint8)
    with computed_by(backend):
        gather_blocks(pool, [], buffer)
        scatter_blocks(buffer, [], pool)
    assert torch.equal(as_bytes(pool), before)


def buffer_of(
    pool: list[torch.Tensor], rows: int, more_bytes: int = 0, dtype: torch.dtype = torch.uint8
) -> torch.Tensor:
    return torch.zeros(rows, block_bytes(pool) + more_bytes, dtype=dtype)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda pool: copy_blocks(pool, [1], [NUM_BLOCKS]), "targets: the pool has 7 blocks, none is 7"),
        (lambda pool: copy_blocks(pool, [-1], [1]), "sources: the pool has 7 blocks, none is -1"),
        (lambda pool: copy_blocks(pool, [1, 2], [3, 3]), "targets: a block is copied to twice"),
        (lambda pool: copy_blocks(pool, [1, 2], [3]), "2 sources, 1 targets and 2 counts"),
        (lambda pool: copy_slots(pool, [1], [3], [5]), "counts: a block has 4 slots, not 5"),
        (lambda pool: copy_slots(pool, [1], [3], [-1]), "counts: a block has 4 slots, not -1"),
        (lambda pool: copy_blocks([*pool, pool[0][:5]], [1], [3]), "caches: .* is not of one pool"),
        (lambda pool: copy_blocks([*pool, pool[0][:, :, :2]], [1], [3]), "caches: .* not contiguous"),
        (lambda pool: gather_blocks(pool, [7], buffer_of(pool, 1)), "block_ids: the pool has 7 blocks, none is 7"),
        (
            lambda pool: gather_blocks(pool, [1], buffer_of(pool, 2)),
            r"buffer: 1 blocks need \(1, \d+\) .*not \(2, \d+\)",
        ),
        (lambda pool: gather_blocks(pool, [1], buffer_of(pool, 1, 1)), "buffer: 1 blocks need"),
        (lambda pool: gather_blocks(pool, [1], buffer_of(pool, 1, dtype=torch.int8)), "of torch.int8"),
        (lambda pool: scatter_blocks(buffer_of(pool, 2), [1, 1], pool), "block_ids: a block is copied to twice"),
        (lambda pool: scatter_blocks(buffer_of(pool, 1), [9], pool), "block_ids: the pool has 7 blocks, none is 9"),
    ],
)
def test_what_makes_no_sense_is_refused_and_nothing_copied(
    call: Callable[[list[torch.Tensor]], None], why: str
) -> None:
    pool = make_pool("4 bytes")
    before = as_bytes(pool)
    with pytest.raises(ValueError, match=why):
        call(pool)
    assert torch.equal(as_bytes(pool), before)
