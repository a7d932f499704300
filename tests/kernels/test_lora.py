"""Multi-LoRA in Triton's interpreter, beside the same in float64; where no adapter is, its room is full of NaN."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.dispatch import computed_by
from kernels.lora import LoraWeights, add_lora
from kernels.lora_batch import LoraBatch, lora_batch
from tests.kernels.interpreted import DTYPES, UNIT, fresh, poisoned, strided

CPU = torch.device("cpu")
NONE = -1
NUM_SLOTS = 4


def adapter_weights(
    slice_sizes: tuple[int, ...], in_features: int, max_rank: int, dtype: torch.dtype, ranks: list[list[int]]
) -> LoraWeights:
    """Adapters of such ranks, by slot and slice."""
    a = poisoned(NUM_SLOTS, len(slice_sizes), max_rank, in_features, dtype=dtype)
    b = poisoned(NUM_SLOTS, sum(slice_sizes), max_rank, dtype=dtype)
    scaling = poisoned(NUM_SLOTS, len(slice_sizes))
    for slot, of_slot in enumerate(ranks):
        rows = b[slot].split(slice_sizes)
        for which, rank in enumerate(of_slot):
            a[slot, which, :rank] = fresh(rank, in_features, dtype=dtype, scale=in_features**-0.5)
            rows[which][:, :rank] = fresh(slice_sizes[which], rank, dtype=dtype)
            if rank:
                scaling[slot, which] = torch.rand(()) * 2 + 0.5
    return LoraWeights(a, b, torch.tensor(ranks, dtype=torch.int32), scaling, slice_sizes)


def exactly(
    before: torch.Tensor, x: torch.Tensor, weights: LoraWeights, adapters: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64 what should come out, and how far from it a right result may be.

    What is shrunk may be off by its rounding and by that of each term of a float32 sum; so may what is expanded of it,
    which torch rounds once more before it is added.
    """
    expected, bound = before.double(), torch.zeros(before.shape, dtype=torch.float64)
    unit, in_float32 = UNIT[x.dtype], 2.0**-23
    for token, adapter in enumerate(adapters.tolist()):
        if adapter == NONE:
            continue
        first = 0
        for which, size in enumerate(weights.slice_sizes):
            rank = int(weights.ranks[adapter, which])
            rows = slice(first, first + size)
            first += size
            if not rank:
                continue
            a = weights.a[adapter, which, :rank].double()
            b = weights.b[adapter, rows, :rank].double()
            scaling = float(weights.scaling[adapter, which])
            shrunk, terms = a @ x[token].double(), a.abs() @ x[token].double().abs()
            error = unit * shrunk.abs() + x.shape[1] * in_float32 * terms
            added = scaling * (b @ shrunk)
            expected[token, rows] += added
            bound[token, rows] = scaling * (b.abs() @ (error + rank * in_float32 * shrunk.abs())) + unit * added.abs()
        bound[token] += UNIT[before.dtype] * 2 * (expected[token].abs() + bound[token])
    return expected, bound


def assert_right(
    output: torch.Tensor, before: torch.Tensor, x: torch.Tensor, weights: LoraWeights, adapters: np.ndarray
) -> None:
    expected, bound = exactly(before, x, weights, adapters)
    assert ((output.double() - expected).abs() <= bound).all()
    without = torch.from_numpy(adapters == NONE)
    assert torch.equal(output[without], before[without])


RANKS = {
    5: [[5, 5, 5], [1, 0, 4], [0, 0, 0], [3, 2, 0]],
    16: [[16, 8, 16], [0, 16, 0], [0, 0, 0], [16, 16, 16]],
    70: [[70, 64, 32], [8, 0, 65], [0, 0, 0], [1, 33, 70]],
}
BATCHES = {
    "nobody": [NONE, NONE],
    "one token": [1],
    "one decode each": [3, NONE, 0, 1, NONE, 0],
    "a prefill": [3] * 17,
    "a prefill and decodes": [0, NONE, *[3] * 65, 1, 0, 2],
}


@pytest.mark.parametrize(
    ("adapters", "max_rank", "dtype"),
    [
        *((batch, max_rank, torch.float32) for batch in BATCHES for max_rank in RANKS),
        # In other types something of everything.
        *(("a prefill and decodes", 70, dtype) for dtype in DTYPES if dtype != torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_equals_float64(backend: str, adapters: str, max_rank: int, dtype: torch.dtype) -> None:
    in_features = 87
    weights = adapter_weights((66, 1, 20), in_features, max_rank, dtype, RANKS[max_rank])
    slots = np.array(BATCHES[adapters])
    x, before = fresh(len(slots), in_features, dtype=dtype), fresh(len(slots), 87, dtype=dtype)
    output = before.clone()
    with computed_by(backend):
        add_lora(output, x, weights, lora_batch(slots, CPU))
    assert_right(output, before, x, weights, slots)


@pytest.mark.parametrize("in_features", [1, 64, 255, 1111])
def test_sums_are_split_however_long(in_features: int) -> None:
    weights = adapter_weights((40,), in_features, 8, torch.float32, [[8], [3], [0], [5]])
    slots = np.array([0, 1, 3, 3, NONE])
    x, before = fresh(5, in_features), fresh(5, 40)
    output = before.clone()
    with computed_by("triton"):
        add_lora(output, x, weights, lora_batch(slots, CPU))
    assert_right(output, before, x, weights, slots)


def test_rows_that_do_not_follow_one_another() -> None:
    weights = adapter_weights((24, 8), 40, 8, torch.float32, [[8, 8], [3, 0], [0, 0], [5, 2]])
    slots = np.array([0, 1, 3, 3, NONE])
    x, before = fresh(5, 40), fresh(5, 32)
    output = strided(before)
    with computed_by("triton"):
        add_lora(output, strided(x), weights, lora_batch(slots, CPU))
    assert_right(output, before, x, weights, slots)


def test_weights_in_bfloat16_add_to_a_result_in_float32() -> None:
    weights = adapter_weights((33,), 64, 8, torch.bfloat16, [[8], [8], [8], [8]])
    slots = np.array([0, 1, 3, 3, NONE])
    x, before = fresh(5, 64, dtype=torch.bfloat16), fresh(5, 33)
    output = before.clone()
    with computed_by("triton"):
        add_lora(output, x, weights, lora_batch(slots, CPU))
    assert_right(output, before, x, weights, slots)


@pytest.mark.parametrize("adapters", [[], *BATCHES.values()], ids=["empty", *BATCHES])
def test_a_batch_of_fixed_size_computes_the_same(adapters: list[int]) -> None:
    weights = adapter_weights((30, 12), 50, 8, torch.float32, [[8, 8], [3, 0], [0, 0], [5, 2]])
    slots = np.array(adapters, dtype=np.int64)
    x, before = fresh(len(slots), 50), fresh(len(slots), 42)
    output, batch = before.clone(), lora_batch(slots, CPU, has_fixed_size=True)
    assert len(batch.rows) == len(batch.tiles) == len(slots)
    with computed_by("triton"):
        add_lora(output, x, weights, batch)
    assert_right(output, before, x, weights, slots)


def test_adapters_that_are_replaced_in_place_take_effect() -> None:
    """As with a CUDA graph: the same tensors, other content."""
    weights = adapter_weights((30,), 50, 8, torch.float32, [[8], [3], [0], [5]])
    others = adapter_weights((30,), 50, 8, torch.float32, [[2], [8], [0], [8]])
    slots, other_slots = np.array([0, 1, NONE, 3]), np.array([3, NONE, 0, 0])
    batch, other_batch = (lora_batch(those, CPU, has_fixed_size=True) for those in (slots, other_slots))
    for name in ("a", "b", "ranks", "scaling"):
        getattr(weights, name).copy_(getattr(others, name))
    for name in ("rows", "tiles"):
        getattr(batch, name).copy_(getattr(other_batch, name))
    x, before = fresh(4, 50), fresh(4, 30)
    output = before.clone()
    with computed_by("triton"):
        add_lora(output, x, weights, batch)
    assert_right(output, before, x, others, other_slots)


def tokens_of(batch: LoraBatch) -> list[tuple[int, int]]:
    """Token and adapter, tile after tile."""
    return [
        (token, adapter)
        for adapter, first, count in batch.tiles.tolist()
        for token in batch.rows[first : first + count].tolist()
    ]


@pytest.mark.parametrize("has_fixed_size", [False, True], ids=["eager", "fixed"])
@pytest.mark.parametrize("num_tokens", [0, 1, 16, 17, 200])
def test_tiles_hold_every_token_once_and_one_adapter_each(num_tokens: int, has_fixed_size: bool) -> None:
    slots = np.random.default_rng().integers(-1, NUM_SLOTS, num_tokens)
    batch = lora_batch(slots, CPU, has_fixed_size=has_fixed_size)
    assert Counter(tokens_of(batch)) == Counter((token, slot) for token, slot in enumerate(slots.tolist()) if slot >= 0)
    assert all(count <= batch.tile_tokens for count in batch.tiles[:, 2].tolist())
    in_segments = [(token, slot) for slot, start, end in batch.segments for token in batch.rows[start:end].tolist()]
    assert in_segments == tokens_of(batch)


def test_weights_that_do_not_fit_together_are_refused() -> None:
    good = adapter_weights((30, 12), 50, 8, torch.float32, [[8, 8], [3, 0], [0, 0], [5, 2]])
    with pytest.raises(ValueError, match=r"b: shape \(4, 42, 8\), but a and slice_sizes make it \(4, 43, 8\)"):
        replace(good, slice_sizes=(30, 13))
    with pytest.raises(ValueError, match="slice_sizes: 3 of them, but a has 2 slices"):
        replace(good, slice_sizes=(30, 6, 6))
    with pytest.raises(ValueError, match=r"ranks: shape \(3, 2\)"):
        replace(good, ranks=good.ranks[:3])
    with pytest.raises(ValueError, match=r"b: torch\.float16, but a is torch\.float32"):
        replace(good, b=good.b.half())


@pytest.mark.parametrize("name", ["output", "x"])
def test_rows_that_lie_in_pieces_are_refused(name: str) -> None:
    """A kernel would read what is between them."""
    weights = adapter_weights((42,), 50, 8, torch.float32, [[8], [0], [0], [0]])
    tensors = {"output": fresh(5, 42, dtype=torch.float32), "x": fresh(5, 50, dtype=torch.float32)}
    tensors[name] = tensors[name].T.contiguous().T
    with pytest.raises(ValueError, match=rf"{name}: expected contiguous rows, got strides \(1, 5\)"):
        add_lora(tensors["output"], tensors["x"], weights, lora_batch(np.zeros(5, dtype=np.int64), CPU))
