"""Blocks that no token of a step sees: their places in a block table are 0, and whatever lies there changes nothing.

Block 0 is full of NaN here. In a pool it is anybody's, and may be written in the same step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import kernels.attention
import kernels.attention_batch
import kernels.attention_metadata
from kernels.attention_plan import PlanLimits
from kernels.dispatch import Backend, computed_by
from kernels.paged_attention import paged_attention

# `test_tiled_attention.py` and `test_attention.py` have what is to be expected of each.
from .interpreted import assert_close, fresh
from .paged_batch import PagedBatch, make_batch

WINDOW = 40
BATCHES: dict[str, dict[str, Any]] = {
    "decodes": {"lengths": [(1, 200), (1, 41), (1, 3), (1, 150), (1, 300)]},
    "chunks": {"lengths": [(70, 300), (16, 48), (5, 160)]},
    "both, in small blocks": {"lengths": [(1, 90), (33, 97), (1, 43), (20, 20)], "block_size": 4},
    "shared up to the windows": {
        "lengths": [(1, 200), (1, 201), (3, 202), (1, 290), (1, 60)],
        "shared": [((0, 1, 2, 3, 4), 3), ((0, 1, 2, 3), 12)],
    },
    "pictures": {"lengths": [(60, 200), (1, 90)], "groups": [[(141, 199)], []]},
    "many heads": {"lengths": [(1, 500), (2, 90)], "num_heads": 8, "num_kv_heads": 1},
}


@pytest.fixture(params=["c", "torch", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend | None]:
    torch.manual_seed(0)
    random.seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    if request.param == "c":
        if not kernels.attention.is_available(torch.float32):
            pytest.skip("not built, or not for this CPU")
        monkeypatch.setattr(kernels.attention_batch, "_OVERHEAD_BYTES", 0)
        yield None
    else:
        # Sharing and dividing pay from the first key on.
        limits = PlanLimits(num_sms=100, min_part_keys=16, prefix_overhead_bytes=0)
        monkeypatch.setattr(kernels.attention_metadata, "plan_limits", lambda device: limits)
        monkeypatch.setattr(kernels.attention, "takes", lambda *_: False)
        yield request.param
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", BATCHES)
def test_they_change_nothing(name: str, backend: Backend | None) -> None:
    batch = make_batch(**BATCHES[name], kept_window=WINDOW)
    assert any(0 in table for table in batch.block_tables)
    check(batch, backend)
    check(batch, backend, softcap=3.0, sinks=fresh(batch.query.shape[1]))


def test_a_block_0_that_another_request_sees_is_no_prefix_of_both(backend: Backend | None) -> None:
    """The first request sees its block 0; the second has a 0 in that place of its table for want of a block."""
    batch = make_batch([(1, 63), (1, 100)], kept_window=WINDOW)
    assert batch.block_tables[0][0] == 0 == batch.block_tables[1][1] and batch.block_tables[0][1]
    for cache in (batch.key_cache, batch.value_cache):
        cache[0], cache[batch.block_tables[0][1]] = cache[batch.block_tables[0][1]].clone(), float("nan")
    batch.block_tables[0][1] = batch.metadata.block_tables[0, 1] = 0
    check(batch, backend)


LENGTHS = [(1, 200), (1, 201), (3, 202), (1, 290), (1, 60)]
ALL_OF_FOUR = ([0, 1, 2, 3], 11)
SHARED: dict[str, tuple[list[tuple[list[int], int]], list[tuple[list[int], int]]]] = {
    "the same prefixes": ([ALL_OF_FOUR], [ALL_OF_FOUR]),
    "no prefixes": ([], []),
    "one that is shorter in the second": ([ALL_OF_FOUR], [([0, 1, 2, 3], 10)]),
    "one that is none in the second": ([ALL_OF_FOUR], []),
    "one of other requests": ([ALL_OF_FOUR], [([0, 1], 11), ([2, 3], 11)]),
}


@pytest.mark.parametrize("name", SHARED)
def test_a_plan_holds_for_other_groups_that_share_alike(name: str, backend: Backend | None) -> None:
    """Two groups of one step: the second's blocks lie elsewhere, in a pool of their own here."""
    first, second = (make_batch(LENGTHS, shared=shared) for shared in SHARED[name])
    second.metadata = replace(second.metadata, alike=[first.metadata])
    for batch in (first, second):
        check(batch, backend, sliding_window=None)
    plans = [batch.metadata._plans if backend == "triton" else batch.metadata._cpu_batches for batch in (first, second)]
    if backend != "torch":
        one, other = (next(iter(each.values())).prefixes for each in plans)
        assert (one is other) == (name in ("the same prefixes", "no prefixes"))


def check(batch: PagedBatch, backend: Backend | None, **options: Any) -> None:
    options = {"scaling": 0.2, "sliding_window": WINDOW} | options
    arguments = (batch.query, batch.key_cache, batch.value_cache, batch.metadata)
    if backend is None:
        actual = paged_attention(*arguments, **options)
    else:
        with computed_by(backend):
            actual = paged_attention(*arguments, **options)
    assert_close(actual, batch.expected(**options), units=50)
