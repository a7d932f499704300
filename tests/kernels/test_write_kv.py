"""Keys and values into the paged cache, rotated on the way or not: in Triton's interpreter and in torch."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from kernels.dispatch import computed_by
from kernels.rotary import rotary
from kernels.rotary_write_kv import rotary_write_kv
from kernels.slot_mapping import SlotMapping
from kernels.write_kv import write_kv
from tests.kernels.interpreted import DTYPES, fresh, poisoned, strided

BACKENDS = pytest.mark.parametrize("backend", ["triton", "torch"])
NUM_BLOCKS, BLOCK_SIZE = 5, 4


@dataclass
class Case:
    """Tokens of a step, a poisoned pool, and where they go; every third token has no slot.

    The caches are the middle of a larger memory: what is written outside them, as to a slot of −1, shows.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_memory: torch.Tensor
    value_memory: torch.Tensor
    slots: list[int]

    @classmethod
    def of(
        cls, num_tokens: int, num_kv_heads: int, head_dims: tuple[int, int], dtype: torch.dtype = torch.float32
    ) -> Case:
        # The last block, where an index of −1 would write, belongs to nobody.
        slots = random.sample(range((NUM_BLOCKS - 1) * BLOCK_SIZE), num_tokens)
        return cls(
            *(fresh(num_tokens, num_kv_heads, head_dim, dtype=dtype) for head_dim in head_dims),
            *(poisoned(NUM_BLOCKS + 2, BLOCK_SIZE, num_kv_heads, head_dim, dtype=dtype) for head_dim in head_dims),
            slots=[-1 if token % 3 == 2 else slot for token, slot in enumerate(slots)],
        )

    @property
    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.key_memory[1:-1], self.value_memory[1:-1]

    @property
    def mapping(self) -> SlotMapping:
        return SlotMapping(torch.tensor(self.slots, dtype=torch.int64))

    def assert_holds(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """The tokens that have a slot, and nothing else."""
        for memory, states in ((self.key_memory, key), (self.value_memory, value)):
            expected = torch.full_like(memory, float("nan"))
            for token, slot in enumerate(self.slots):
                if slot >= 0:
                    expected[1 + slot // BLOCK_SIZE, slot % BLOCK_SIZE] = states[token]
            assert_equal(memory, expected)


def assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_kv_heads", "head_dims"),
    [(1, 1, (1, 1)), (7, 2, (16, 16)), (16, 1, (80, 24)), (3, 9, (256, 256)), (4, 3, (12, 40)), (0, 2, (16, 16))],
    ids=str,
)
@BACKENDS
def test_tokens_lie_in_their_slots_and_nowhere_else(
    backend: str, num_tokens: int, num_kv_heads: int, head_dims: tuple[int, int], dtype: torch.dtype
) -> None:
    case = Case.of(num_tokens, num_kv_heads, head_dims, dtype)
    with computed_by(backend):
        write_kv(case.key, case.value, *case.caches, case.mapping)
    case.assert_holds(case.key, case.value)


@BACKENDS
def test_a_step_that_writes_nothing_at_all(backend: str) -> None:
    case = Case.of(1, 2, (8, 8))
    case.slots = [-1]
    with computed_by(backend):
        write_kv(case.key, case.value, *case.caches, case.mapping)
    assert case.key_memory.isnan().all() and case.value_memory.isnan().all()


@BACKENDS
def test_keys_and_values_that_are_parts_of_others(backend: str) -> None:
    """Heads first, as transformers hands them over, and a view whose values lie apart."""
    case = Case.of(7, 3, (16, 16))
    key = strided(case.key.transpose(0, 1).contiguous()).transpose(0, 1)
    value = case.value.transpose(1, 2).contiguous().transpose(1, 2)
    with computed_by(backend):
        write_kv(key, value, *case.caches, case.mapping)
    case.assert_holds(case.key, case.value)


@BACKENDS
def test_a_cache_of_another_type(backend: str) -> None:
    case = Case.of(7, 2, (16, 16))
    case.key_memory, case.value_memory = case.key_memory.half(), case.value_memory.half()
    with computed_by(backend):
        write_kv(case.key, case.value, *case.caches, case.mapping)
    case.assert_holds(case.key.half(), case.value.half())


@BACKENDS
def test_a_cache_that_is_no_view_is_refused(backend: str) -> None:
    """Flattened, it would be a copy: the write would be lost."""
    case = Case.of(2, 2, (16, 16))
    with computed_by(backend), pytest.raises(RuntimeError, match="view"):
        write_kv(case.key, case.value, case.caches[0][:, :3], case.caches[1], case.mapping)


def test_which_tokens_are_stored_is_worked_out_once_per_step() -> None:
    everything, some = SlotMapping(torch.tensor([5, 2])), SlotMapping(torch.tensor([-1, 5, -1, 2]))
    assert everything.stored[0] is None and everything.stored[1] is everything.tensor
    rows, slots = some.stored
    assert rows is not None and rows.tolist() == [1, 3] and slots.tolist() == [5, 2]
    assert some.stored[1] is slots


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "head_dims", "num_pairs"),
    [
        (1, 1, 1, (2, 1), 1),
        (7, 8, 1, (16, 16), 8),
        (4, 9, 3, (80, 24), 16),
        (2, 10, 10, (256, 256), 128),
        (0, 4, 2, (16, 16), 8),
    ],
    ids=str,
)
@BACKENDS
def test_rotated_on_the_way_as_rotated_before(
    backend: str,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dims: tuple[int, int],
    num_pairs: int,
    interleaved: bool,
    dtype: torch.dtype,
) -> None:
    case = Case.of(num_tokens, num_kv_heads, head_dims, dtype)
    query, angles = fresh(num_tokens, num_heads, head_dims[0], dtype=dtype), fresh(num_tokens, num_pairs, scale=9)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    arguments = strided(query), strided(case.key), strided(case.value), strided(cos), strided(sin)
    before = [argument.clone() for argument in arguments]
    with computed_by(backend):
        expected_query, expected_key = rotary(query, case.key, cos, sin, interleaved=interleaved)
        output = rotary_write_kv(*arguments, *case.caches, case.mapping, interleaved=interleaved)
    assert_equal(output, expected_query)
    case.assert_holds(expected_key, case.value)
    assert all(torch.equal(now, then) for now, then in zip(arguments, before, strict=True))
