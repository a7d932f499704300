"""Copies and tests that take no other cores."""

from __future__ import annotations

import pytest
import torch

from kernels.one_thread import chunks, copy_into


@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 100), (16, 14_336), (14_336, 16), (7, 32_767), (5, 40_000), (0, 8), (4, 0)]
)
def test_chunks_are_all_rows_in_order_and_small(shape: tuple[int, int]) -> None:
    x = torch.arange(shape[0] * shape[1]).view(shape)
    parts = list(chunks(x))
    assert torch.equal(torch.cat(parts), x)
    assert all(part.numel() < 32_768 or len(part) == 1 for part in parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_copy_converts_and_may_go_into_part_of_something(dtype: torch.dtype) -> None:
    source = torch.randn(3000, 12)
    room = torch.full((3000, 16), 7.0, dtype=dtype)
    copy_into(room[:, :12], source)
    assert torch.equal(room[:, :12], source.to(dtype))
    assert bool((room[:, 12:] == 7).all())
