"""Keys and values into a quantized cache, in Triton's interpreter: the bits that torch writes, rotated or not."""

from __future__ import annotations

import random

import pytest
import torch

from kernels.dispatch import computed_by
from kernels.quantize_kv import LARGEST, KVScales
from kernels.rotary import rotary
from kernels.rotary_write_kv import rotary_write_kv
from kernels.slot_mapping import SlotMapping
from kernels.write_kv import write_kv
from tests.kernels.interpreted import DTYPES, fresh, strided

CODES = pytest.mark.parametrize("codes", LARGEST, ids=str)
BLOCK_SIZE = 4


class Pool:
    """Caches that are the middle of a larger memory, all of it 77: what is written where nothing should be, shows."""

    def __init__(self, codes: torch.dtype, num_kv_heads: int, head_dims: tuple[int, int], num_tokens: int) -> None:
        shape = -(-num_tokens // BLOCK_SIZE) + 3, BLOCK_SIZE, num_kv_heads
        self.memory = [
            *(torch.full((*shape, head_dim), 77, dtype=torch.uint8).view(codes) for head_dim in head_dims),
            *(torch.full(shape, 77.0) for _ in head_dims),
        ]

    @property
    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.memory[0][1:-1], self.memory[1][1:-1]

    @property
    def scales(self) -> KVScales:
        return KVScales(self.memory[2][1:-1], self.memory[3][1:-1])

    def assert_equals(self, other: Pool) -> None:
        for ours, theirs in zip(self.memory, other.memory, strict=True):
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def some_slots(num_tokens: int) -> SlotMapping:
    """Every third token has none, and the last block, where an index of −1 would write, belongs to nobody."""
    slots = random.sample(range(-(-num_tokens // BLOCK_SIZE) * BLOCK_SIZE), num_tokens)
    return SlotMapping(torch.tensor([-1 if token % 3 == 2 else slot for token, slot in enumerate(slots)]).long())


def of_all_sizes(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Tokens of all sizes that `dtype` has, and such as lie between two codes."""
    sized = [fresh(1, num_kv_heads, head_dim) * 10.0**power for power in range(-45, 38, 4)]
    between = []
    for codes, largest in LARGEST.items():
        numbers = torch.arange(256, dtype=torch.uint8).view(codes).float()
        numbers = numbers[numbers.isfinite()].unique()
        ties = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2])
        tokens = ties[torch.randint(len(ties), (5, num_kv_heads, head_dim))]
        tokens[..., 0] = largest
        between.append(tokens)
    # What has become infinite has no codes.
    tokens = torch.cat([*sized, *between, torch.zeros(1, num_kv_heads, head_dim)]).to(dtype).nan_to_num()
    if dtype == torch.bfloat16:
        # Smaller ones are something else to the interpreter.
        tokens[tokens.abs() < torch.finfo(dtype).tiny] = 0
    return tokens


@CODES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_kv_heads", "head_dims"), [(3, (33, 7)), (1, (64, 64)), (9, (1, 256))], ids=str)
def test_codes_and_scales_are_those_of_torch(
    num_kv_heads: int, head_dims: tuple[int, int], dtype: torch.dtype, codes: torch.dtype
) -> None:
    torch.manual_seed(0)
    key, value = (of_all_sizes(num_kv_heads, head_dim, dtype) for head_dim in head_dims)
    slots = some_slots(len(key))
    pools = []
    for backend in ("triton", "torch"):
        pool = Pool(codes, num_kv_heads, head_dims, len(key))
        with computed_by(backend):
            write_kv(strided(key), strided(value), *pool.caches, slots, pool.scales)
        pools.append(pool)
    pools[0].assert_equals(pools[1])
    assert (pools[0].memory[2] != 77).sum() == num_kv_heads * (slots.tensor >= 0).sum()


@CODES
@pytest.mark.parametrize("what", ["nan", "inf", "-inf"])
def test_of_what_is_no_number_nobody_reads_one(what: str, codes: torch.dtype) -> None:
    key, value = fresh(2, 2, 8), fresh(2, 2, 8)
    key[0, 1, 3] = value[0, 0, 7] = float(what)
    pool = Pool(codes, 2, (8, 8), 2)
    with computed_by("triton"):
        write_kv(key, value, *pool.caches, SlotMapping(torch.tensor([5, 6])), pool.scales)
    for cache, scales, harmed in zip(pool.caches, pool.scales, (1, 0), strict=True):
        numbers = (cache.float() * scales[..., None]).flatten(0, 1)[5:7]
        assert numbers[0, harmed].isnan().all()
        assert numbers[0, 1 - harmed].isfinite().all() and numbers[1].isfinite().all()


@CODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "head_dims", "num_pairs"),
    [(4, 9, 3, (80, 24), 16), (7, 8, 1, (16, 16), 8), (2, 3, 3, (12, 40), 5), (0, 4, 2, (16, 16), 8)],
    ids=str,
)
def test_rotated_on_the_way_as_rotated_before(
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dims: tuple[int, int],
    num_pairs: int,
    interleaved: bool,
    dtype: torch.dtype,
    codes: torch.dtype,
) -> None:
    query, angles = fresh(num_tokens, num_heads, head_dims[0], dtype=dtype), fresh(num_tokens, num_pairs, scale=9)
    key, value = (fresh(num_tokens, num_kv_heads, head_dim, dtype=dtype) for head_dim in head_dims)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    slots = some_slots(num_tokens)
    pool, expected = (Pool(codes, num_kv_heads, head_dims, num_tokens) for _ in range(2))
    with computed_by("triton"):
        arguments = strided(query), strided(key), strided(value), strided(cos), strided(sin)
        output = rotary_write_kv(*arguments, *pool.caches, slots, pool.scales, interleaved=interleaved)
        rotated_query, rotated_key = rotary(query, key, cos, sin, interleaved=interleaved)
        write_kv(rotated_key, value, *expected.caches, slots, expected.scales)
    assert torch.equal(output, rotated_query)
    pool.assert_equals(expected)
