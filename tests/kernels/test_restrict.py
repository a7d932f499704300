"""What min-p, top-k and top-p keep, in torch and in Triton's interpreter, beside a sorted row in float64."""

from __future__ import annotations

import pytest
import torch

from kernels.dispatch import computed_by
from kernels.restrict import Kept, Restrictions, restrict
from tests.kernels.interpreted import DTYPES, fresh, strided

# What the sums of the kernel may be off by, as a share of the whole.
SUM_ERROR = 2.0**-16
# top_k, top_p, min_p
SETTINGS = [
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (3, 1.0, 0.0),
    (50, 1.0, 0.0),
    (2**31 - 1, 1.0, 0.0),
    (0, 1e-30, 0.0),
    (0, 0.3, 0.0),
    (0, 0.95, 0.0),
    (0, 0.9999, 0.0),
    (0, 1.0, 0.05),
    (0, 1.0, 1.0),
    (0, 0.9, 0.01),
    (20, 0.8, 0.0),
    (5, 0.5, 0.2),
    (1000, 0.95, 0.3),
]


def restrictions_of(settings: list[tuple[int, float, float]]) -> Restrictions:
    top_k, top_p, min_p = zip(*settings, strict=True)
    return Restrictions(
        torch.tensor(top_k), torch.tensor(top_p, dtype=torch.float64), torch.tensor(min_p, dtype=torch.float64)
    )


def is_kept(logits: torch.Tensor, kept: Kept) -> torch.Tensor:
    threshold, last_equal = kept.threshold[:, None], kept.last_equal[:, None]
    ids = torch.arange(logits.shape[-1])
    return (logits.float() > threshold) | ((logits.float() == threshold) & (ids <= last_equal))


def check_row(
    is_kept: torch.Tensor, logits: torch.Tensor, temperature: float, setting: tuple[int, float, float]
) -> None:
    """The kept are the head of the sorted row, and as many as the settings say, but for what sums may be off by."""
    top_k, top_p, min_p = setting
    order = logits.double().argsort(descending=True, stable=True)
    weights = ((logits.float() - logits.float().max()) / temperature).double().exp()[order]
    possible = logits[order] > float("-inf")
    is_kept = is_kept[order] & possible
    number = int(is_kept.sum())
    assert is_kept[:number].all()
    survivors = int((possible & (weights.log().float() >= torch.tensor(min_p).log())).sum())
    survivors = min(survivors, top_k) if top_k else survivors
    if top_p >= 1:
        assert number == survivors
        return
    weights = weights[:survivors]
    before = (weights.cumsum(0) - weights) / weights.sum()
    least = max(1, int((before < top_p - SUM_ERROR).sum()))
    most = max(1, int((before < top_p + SUM_ERROR).sum()))
    assert least <= number <= most


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 7, 256, 300])
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_keeps_the_head_of_the_sorted_row(backend: str, vocab_size: int, dtype: torch.dtype) -> None:
    # Rounded, so that there are equals of both signs, and some −inf, as rules leave them.
    logits = fresh(len(SETTINGS), vocab_size, scale=4).mul(4).round().div(4).to(dtype)
    logits[:, 2::5] = float("-inf")
    temperature = torch.rand(len(SETTINGS)) + 0.3
    with computed_by(backend):
        kept = restrict(strided(logits), logits.amax(-1).float(), temperature, restrictions_of(SETTINGS))
    assert kept.threshold.dtype == torch.float32 and kept.last_equal.dtype == torch.int64
    for row, setting in enumerate(SETTINGS):
        check_row(is_kept(logits, kept)[row], logits[row], temperature[row].item(), setting)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_looks_at_all_of_a_wide_vocabulary(backend: str) -> None:
    """More than one block, more than a first look, and a nucleus in the last block."""
    settings = [(3000, 1.0, 0.0), (0, 0.9, 0.0), (4000, 0.9, 0.0), (0, 0.5, 0.0)]
    logits = fresh(4, 9001, scale=0.5)
    logits[3, -1] = 20
    temperature = torch.full((4,), 1.5)
    with computed_by(backend):
        kept = restrict(logits, logits.amax(-1), temperature, restrictions_of(settings))
    for row, setting in enumerate(settings):
        check_row(is_kept(logits, kept)[row], logits[row], 1.5, setting)
    assert is_kept(logits, kept).sum(-1)[[0, 3]].tolist() == [3000, 1]


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_equals_are_let_in_from_the_lowest_id(backend: str) -> None:
    # −0 and 0 are equals, too.
    logits = torch.tensor([[-1.0, -0.0, 0.0, -0.0, 0.0]] * 4)
    settings = [(1, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.5, 0.9), (2, 0.4, 0.0)]
    with computed_by(backend):
        kept = restrict(logits, torch.zeros(4), torch.ones(4), restrictions_of(settings))
    numbers = [1, 3, 2, 1]
    assert is_kept(logits, kept).tolist() == [[False, *(i < number for i in range(4))] for number in numbers]


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_so_are_those_of_several_blocks(backend: str) -> None:
    logits = torch.zeros(2, 9001)
    with computed_by(backend):
        kept = restrict(logits, torch.zeros(2), torch.ones(2), restrictions_of([(5000, 1.0, 0.0), (0, 0.5, 0.0)]))
    assert kept.last_equal.tolist() == [4999, 4500]
    assert is_kept(logits, kept).sum(-1).tolist() == [5000, 4501]


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("temperature", [1e-44, 1e-30, 1e30])
def test_extreme_temperatures(backend: str, temperature: float) -> None:
    """Cold, only the highest and its equals have any weight; hot, all have the same."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, -5.0, -1e30]] * 3)
    settings = [(0, 0.99, 0.0), (0, 1.0, 0.5), (4, 0.6, 0.0)]
    with computed_by(backend):
        kept = restrict(logits, torch.full((3,), 3.0), torch.full((3,), temperature), restrictions_of(settings))
    cold = [[1, 3], [1, 3], [1, 3]]
    hot = [list(range(6)), list(range(6)), [1, 2, 3]]
    kept_ids = [row.nonzero().flatten().tolist() for row in is_kept(logits, kept)]
    # At 1e30 the last logit still weighs a third of the others.
    assert kept_ids == (cold if temperature < 1 else [hot[0], [0, 1, 2, 3, 4], hot[2]])


def test_no_rows() -> None:
    for backend in ("triton", "torch"):
        with computed_by(backend):
            kept = restrict(
                torch.empty(0, 9),
                *torch.empty(2, 0),
                Restrictions(*(values[:0] for values in restrictions_of(SETTINGS))),
            )
        assert len(kept.threshold) == len(kept.last_equal) == 0
