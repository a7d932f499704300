"""What adapters add to a linear layer, in every library that this CPU can use; what nobody may read is NaN."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch

from kernels import lora_in_c
from kernels.lora import LoraPart, add_lora
from kernels.lora_batch import LoraBatch, lora_batch
from kernels.lora_in_c import LoraSlots, PackedLora, pack_lora

from .libraries import each_library
from .tensors import fresh, poisoned

CPU = torch.device("cpu")
NONE = -1
# An adapter's part of each slice, by rank; the last slot is empty.
SLICE_SIZES = (66, 1, 20)
RANKS = [[5, 5, 5], [1, 0, 4], [70, 64, 33], [0, 16, 0]]
EMPTY = len(RANKS)
Parts = Sequence[LoraPart | None]

dtype = each_library(lora_in_c)
pytestmark = pytest.mark.usefixtures("inference")


def make_part(in_features: int, size: int, rank: int, dtype: torch.dtype) -> LoraPart | None:
    if not rank:
        return None
    a = fresh(rank, in_features, dtype=dtype, scale=in_features**-0.5)
    return LoraPart(a, fresh(size, rank, dtype=dtype), float(torch.rand(()) + 0.5))


def make_adapters(
    in_features: int,
    dtype: torch.dtype,
    slice_sizes: Sequence[int] = SLICE_SIZES,
    ranks: Sequence[Sequence[int]] = RANKS,
) -> tuple[list[Parts], LoraSlots]:
    adapters = [
        [make_part(in_features, size, rank, dtype) for size, rank in zip(slice_sizes, of_adapter, strict=True)]
        for of_adapter in ranks
    ]
    slots = LoraSlots(len(adapters) + 1, in_features, sum(slice_sizes), dtype)
    for slot, parts in enumerate(adapters):
        slots.place(slot, pack_lora(parts, slice_sizes, in_features, dtype))
    return adapters, slots


def batch_of(slots: Sequence[int]) -> LoraBatch:
    return lora_batch(np.array(slots, dtype=np.int64), CPU)


def assert_right(
    output: torch.Tensor, before: torch.Tensor, x: torch.Tensor, adapters: Sequence[Parts], slots: Sequence[int]
) -> None:
    """As far from float64 as what is shrunk may be by its one rounding, float32 sums, and the result's one rounding."""
    unit = torch.finfo(x.dtype).eps / 2
    for token, slot in enumerate(slots):
        if slot in (NONE, EMPTY):
            assert torch.equal(output[token], before[token])
            continue
        exact, bound, first = before[token].double(), torch.zeros(before.shape[1], dtype=torch.float64), 0
        sizes = [before.shape[1]] if len(adapters[slot]) == 1 else SLICE_SIZES
        for part, size in zip(adapters[slot], sizes, strict=True):
            if part is not None:
                shrunk = part.scaling * (part.a.double() @ x[token].double())
                exact[first : first + size] += part.b.double() @ shrunk
                bound[first : first + size] = part.b.double().abs() @ (unit * shrunk.abs() + 1e-5)
            first += size
        assert ((output[token].double() - exact).abs() <= bound + unit * (exact.abs() + bound) + 1e-5).all()


BATCHES = {
    "nobody": [NONE, NONE],
    "one token": [1],
    "one decode each": [2, NONE, 0, 1, EMPTY, 3, 0],
    "scattered": [0, 1] * 12,
    "a prefill": [2] * 17,
    "a prefill and decodes": [0, NONE, *[2] * 165, 1, 3, 0],
}


@pytest.mark.parametrize("in_features", [1, 87, 600])
@pytest.mark.parametrize("slots", BATCHES.values(), ids=BATCHES)
def test_equals_float64(dtype: torch.dtype, slots: list[int], in_features: int) -> None:
    adapters, room = make_adapters(in_features, dtype)
    x, before = fresh(len(slots), in_features, dtype=dtype), fresh(len(slots), 87, dtype=dtype)
    output = before.clone()
    add_lora(output, x, room, batch_of(slots))
    assert_right(output, before, x, adapters, slots)


def test_any_rank_and_any_size(dtype: torch.dtype) -> None:
    for rank in range(1, 71):
        size = 3 * rank - 2
        adapters, room = make_adapters(40, dtype, [size], [[rank]])
        x, before = fresh(2, 40, dtype=dtype), fresh(2, size, dtype=dtype)
        output = before.clone()
        room.add(output, x, batch_of([0, NONE]))
        # The other slot is empty, and the token has none.
        assert torch.equal(output[1], before[1])
        exact = before[0].double()
        for part in adapters[0]:
            assert part is not None
            exact += part.scaling * (part.b.double() @ (part.a.double() @ x[0].double()))
        difference = (output[0].double() - exact).norm()
        assert difference <= 4 * torch.finfo(dtype).eps * exact.norm() + 1e-5


def test_rows_need_not_follow_one_another(dtype: torch.dtype) -> None:
    """And nothing is written beside them."""
    slots = BATCHES["a prefill and decodes"]
    adapters, room = make_adapters(50, dtype)
    wide_x, wide = (poisoned(len(slots), 100, dtype=dtype) for _ in range(2))
    x, output = wide_x[:, 3:53], wide[:, 7:94]
    x.copy_(fresh(len(slots), 50)), output.copy_(fresh(len(slots), 87))
    before = output.clone()
    room.add(output, x, batch_of(slots))
    assert_right(output, before, x, adapters, slots)
    assert wide[:, :7].isnan().all() and wide[:, 94:].isnan().all()


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_a_row_is_the_same_in_any_batch_and_any_number_of_threads(dtype: torch.dtype, num_threads: int) -> None:
    _, room = make_adapters(576, dtype)
    slots = [2, 2, 0, NONE, 2, 1, *[2] * 30, 0, 3, 0, 2]
    x, before = fresh(len(slots), 576, dtype=dtype), fresh(len(slots), 87, dtype=dtype)

    def computed(rows: slice) -> torch.Tensor:
        output = before[rows].clone()
        room.add(output, x[rows], batch_of(slots[rows]))
        return output

    torch.set_num_threads(1)
    alone = torch.cat([computed(slice(row, row + 1)) for row in range(len(slots))])
    torch.set_num_threads(num_threads)
    for first, end in pairwise([0, 1, 4, 13, len(slots)]):
        assert torch.equal(computed(slice(first, end)), alone[first:end])
    assert torch.equal(computed(slice(None)), alone)


def test_what_is_not_a_number_stays_in_its_row(dtype: torch.dtype) -> None:
    _, room = make_adapters(50, dtype)
    slots = [2, 0, 2, NONE, 2]
    x, before = fresh(5, 50, dtype=dtype), fresh(5, 87, dtype=dtype)
    expected, output = before.clone(), before.clone()
    room.add(expected, x, batch_of(slots))
    x[2:4, 7] = float("nan")
    room.add(output, x, batch_of(slots))
    assert output[2].isnan().all()
    output[2] = expected[2]
    assert torch.equal(output, expected)


def test_an_adapter_of_another_type_is_rounded(dtype: torch.dtype) -> None:
    part = make_part(32, 40, 8, torch.float64)
    assert part is not None
    rounded = LoraPart(part.a.to(dtype), part.b.to(dtype), part.scaling)
    x, outputs = fresh(1, 32, dtype=dtype), []
    for each in (part, rounded):
        room, output = LoraSlots(1, 32, 40, dtype), torch.zeros(1, 40, dtype=dtype)
        room.place(0, pack_lora([each], [40], 32, dtype))
        room.add(output, x, batch_of([0]))
        outputs.append(output)
    assert torch.equal(*outputs) and outputs[0].count_nonzero() > 0


def test_a_slot_has_what_was_placed_last(dtype: torch.dtype) -> None:
    adapters, room = make_adapters(30, dtype)
    x, before, slots = fresh(3, 30, dtype=dtype), fresh(3, 87, dtype=dtype), [1, 0, 1]
    room.place(1, pack_lora(adapters[2], SLICE_SIZES, 30, dtype))
    output = before.clone()
    room.add(output, x, batch_of(slots))
    assert_right(output, before, x, adapters, [2, 0, 2])
    room.place(1, None)
    output = before.clone()
    room.add(output, x, batch_of(slots))
    assert_right(output, before, x, adapters, [NONE, 0, NONE])


def test_what_an_adapter_weighs(dtype: torch.dtype) -> None:
    """A filled up to whole panels of 16, B to 32 outputs and whole steps; a slice that is left alone weighs nothing."""
    step = 2 if dtype is torch.bfloat16 else 1
    packed = pack_lora([make_part(30, 64, 17, dtype), None], [64, 32], 30, dtype)
    assert (packed.rank, packed.shrunk_size) == (17, 32)
    assert packed.num_bytes == (32 * 30 + 64 * -(-17 // step) * step) * dtype.itemsize + 32 * 4
    assert pack_lora([None], [64], 30, dtype).num_bytes == 0


def test_parts_that_do_not_fit_are_refused(dtype: torch.dtype) -> None:
    part = make_part(30, 64, 8, dtype)
    for sizes, in_features in (([63], 30), ([64], 31)):
        with pytest.raises(ValueError, match=rf"a is \[8, 30\] and b \[64, 8\] where {in_features} inputs"):
            pack_lora([part], sizes, in_features, dtype)
    with pytest.raises(ValueError, match="longer"):
        pack_lora([part], [64, 64], 30, dtype)


def test_what_is_for_another_layer_is_refused(dtype: torch.dtype) -> None:
    room = LoraSlots(2, 30, 64, dtype)
    other = torch.float32 if dtype is torch.bfloat16 else torch.bfloat16

    def packed(in_features: int, size: int, dtype: torch.dtype) -> PackedLora:
        return pack_lora([make_part(in_features, size, 8, dtype)], [size], in_features, dtype)

    for wrong in (packed(31, 64, dtype), packed(30, 65, dtype), packed(30, 64, other)):
        with pytest.raises(ValueError, match="is not for 30 and 64"):
            room.place(0, wrong)
    with pytest.raises(IndexError):
        room.place(2, packed(30, 64, dtype))
    assert not room.shrunk_size


def test_a_batch_that_does_not_fit_is_refused(dtype: torch.dtype) -> None:
    room, x, output = make_adapters(30, dtype)[1], fresh(2, 30, dtype=dtype), fresh(2, 87, dtype=dtype)
    batch = batch_of([0, 1])
    for wrong_output, wrong_x, message in (
        (output[:1], x, r"output: expected .* \[2, 87\] .* \[1, 87\]"),
        (output.half(), x, r"output: expected .* got torch.float16"),
        (output, x[:, :29], r"x: expected .* \[2, 30\] .* \[2, 29\]"),
        (output, x.T.contiguous().T, r"x: expected .* with contiguous rows"),
        (output, x.to("meta"), r"x: .* on meta"),
    ):
        with pytest.raises(ValueError, match=message):
            room.add(wrong_output, wrong_x, batch)
    with pytest.raises(ValueError, match=r"there are 5 slots, but adapters in \(0, 5\)"):
        room.add(output, x, batch_of([0, 5]))


def test_without_the_library_the_error_says_so(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_in_c, "library", lambda _: None)
    assert not lora_in_c.is_available(dtype)
    with pytest.raises(RuntimeError, match="there are no LoRA kernels for"):
        LoraSlots(1, 30, 64, dtype)
