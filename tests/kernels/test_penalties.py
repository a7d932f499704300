"""Penalties, in torch and in Triton's interpreter, beside their definition in float64."""

from __future__ import annotations

import pytest
import torch

from kernels.dispatch import computed_by
from kernels.penalties import LARGEST_LOGIT, Penalties, SeenTokens, penalize
from tests.kernels.interpreted import assert_close, fresh, strided

LENGTHS = [513, 0, 1, 512]
ROWS = [4, 0, 1, 5]
VOCAB_SIZE = 600


def make_lists() -> tuple[SeenTokens, Penalties]:
    seen = SeenTokens(
        ids=torch.cat([torch.randperm(VOCAB_SIZE)[:length] for length in LENGTHS]),
        counts=torch.randint(0, 4, (sum(LENGTHS),)),
        starts=torch.tensor([0, *LENGTHS]).cumsum(0),
        longest=max(LENGTHS),
    )
    return seen, Penalties(torch.tensor(ROWS), torch.rand(4) + 0.5, torch.randn(4), torch.randn(4))


def exactly(logits: torch.Tensor, seen: SeenTokens, penalties: Penalties) -> torch.Tensor:
    result = logits.double()
    for index, row in enumerate(penalties.rows.tolist()):
        repetition, frequency, presence = (values[index].item() for values in penalties[1:])
        for place in range(int(seen.starts[index]), int(seen.starts[index + 1])):
            token, count = seen.ids[place], seen.counts[place]
            logit = result[row, token].clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
            logit = logit / repetition if logit > 0 else logit * repetition
            result[row, token] = logit - frequency * count - presence * (count > 0)
    return result


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_equals_the_definition(backend: str) -> None:
    logits = fresh(6, VOCAB_SIZE, scale=5)
    seen, penalties = make_lists()
    expected = exactly(logits, seen, penalties)
    penalized = strided(logits)
    with computed_by(backend):
        penalize(penalized, seen, penalties)
    # Of differences of numbers of about 20, in units of the result.
    assert_close(penalized, expected, units=32)
    unseen = expected == logits.double()
    assert torch.equal(penalized[unseen], logits[unseen])
    whole = penalized._base
    assert whole is not None and whole.isnan().sum() == whole.numel() - penalized.numel()


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_infinities_do_not_get_past_it(backend: str) -> None:
    logits = torch.tensor([[float("inf"), float("-inf"), float("inf"), 1.0]])
    seen = SeenTokens(torch.tensor([1, 0]), torch.tensor([0, 2]), torch.tensor([0, 2]), 2)
    penalties = Penalties(torch.tensor([0]), torch.tensor([1.0]), torch.tensor([0.5]), torch.tensor([0.5]))
    with computed_by(backend):
        penalize(logits, seen, penalties)
    assert logits[0, :2].tolist() == pytest.approx([LARGEST_LOGIT, -LARGEST_LOGIT])
    assert logits[0, 2:].tolist() == [float("inf"), 1.0]


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_nothing_seen_changes_nothing(backend: str) -> None:
    logits = fresh(2, 10)
    none = torch.tensor([], dtype=torch.int64)
    before = logits.clone()
    with computed_by(backend):
        penalize(logits, SeenTokens(none, none, torch.tensor([0]), 0), Penalties(none, *torch.empty(3, 0)))
        penalize(
            logits,
            SeenTokens(none, none, torch.tensor([0, 0]), 0),
            Penalties(torch.tensor([1]), *torch.full((3, 1), 2.0)),
        )
    assert torch.equal(logits, before)
