"""Tokens drawn in the interpreter are torch's for the same seeds; `tests/model/test_sampler.py` says what they mean."""

from __future__ import annotations

import pytest
import torch

from kernels.dispatch import computed_by
from kernels.gumbel import gumbel_noise
from kernels.restrict import Restrictions
from kernels.sample_tokens import Randomness, sample_tokens
from tests.kernels.interpreted import DTYPES, fresh, strided
from tests.model.sampling import chi_square_p_value


def randomness_of(num_rows: int) -> Randomness:
    """Every third row is greedy."""
    temperature = torch.rand(num_rows) * 1.5 + 0.1
    temperature[::3] = 0
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,))
    return Randomness(temperature, seeds, torch.randint(1, 100_000, (num_rows,)))


def restrictions_of(num_rows: int) -> Restrictions:
    """Each of them off in about half of the rows."""

    def sometimes(values: torch.Tensor, off: float) -> torch.Tensor:
        return torch.where(torch.rand(num_rows) < 0.5, values, off)

    uniform = torch.rand(3, num_rows, dtype=torch.float64)
    return Restrictions(
        sometimes((uniform[0] * 50).long() + 1, 0).long(), sometimes(uniform[1], 1.0), sometimes(uniform[2] / 5, 0.0)
    )


def assert_same_tokens(logits: torch.Tensor, *args: Randomness | Restrictions | None) -> torch.Tensor:
    with computed_by("torch"):
        expected = sample_tokens(logits, *args)
    with computed_by("triton"):
        tokens = sample_tokens(logits, *args)
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == expected.tolist()
    return tokens


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 5, 64, 1025, 2500])
def test_tokens_are_those_of_torch(vocab_size: int, dtype: torch.dtype) -> None:
    num_rows = 9
    logits = strided(fresh(num_rows, vocab_size, dtype=dtype, scale=3))
    assert_same_tokens(logits)
    assert_same_tokens(logits, randomness_of(num_rows))
    assert_same_tokens(logits, randomness_of(num_rows), restrictions_of(num_rows))


def test_draws_follow_the_softmax() -> None:
    num_draws = 200
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 1.5, -3.0])
    randomness = Randomness(torch.full((num_draws,), 2.0), torch.arange(num_draws), torch.ones(num_draws).long())
    tokens = assert_same_tokens(logits.expand(num_draws, -1), randomness)
    expected = (logits / 2).softmax(-1) * num_draws
    assert chi_square_p_value(torch.bincount(tokens, minlength=8), expected) > 1e-4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_greedy_takes_the_lowest_id_among_equals(dtype: torch.dtype) -> None:
    logits = torch.zeros(4, 3000, dtype=dtype)
    logits[1, [1500, 1499, 2900]] = 1
    logits[2] = float("-inf")
    logits[2, 2999] = -7
    logits[3] = -1
    for args in ((), (Randomness(torch.zeros(4), *torch.ones(2, 4).long()),)):
        assert assert_same_tokens(logits, *args).tolist() == [0, 1499, 2999, 0]


def test_a_logit_of_minus_infinity_is_never_drawn() -> None:
    logits = torch.full((8, 2100), float("-inf"))
    logits[torch.arange(8), torch.arange(8) * 299] = fresh(8)
    randomness = randomness_of(8)
    for restrictions in (None, restrictions_of(8)):
        assert assert_same_tokens(logits, randomness, restrictions).tolist() == [i * 299 for i in range(8)]


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_a_tiny_temperature_is_greedy() -> None:
    logits = fresh(6, 1100)
    randomness = randomness_of(6)._replace(temperature=torch.tensor([1e-30, 1e-37, 1e-44] * 2))
    for restrictions in (None, restrictions_of(6)):
        assert assert_same_tokens(logits, randomness, restrictions).tolist() == logits.argmax(-1).tolist()


def test_float32_does_not_decide() -> None:
    """Two tokens in different chunks, their scores as close as float32 logits can bring them, which is closer than
    float32 can tell."""
    num_rows, vocab_size = 24, 1500
    randomness = randomness_of(num_rows)._replace(temperature=torch.ones(num_rows))
    noise = gumbel_noise(randomness.seeds[:, None], randomness.positions[:, None], torch.arange(vocab_size))
    logits = torch.full((num_rows, vocab_size), float("-inf"))
    logits[:, 3] = 0
    logits[:, 1400] = (noise[:, 3] - noise[:, 1400]).float()
    tokens = assert_same_tokens(logits, randomness)
    assert set(tokens.tolist()) == {3, 1400}


def test_a_row_depends_on_itself_alone() -> None:
    logits, randomness, restrictions = fresh(6, 70), randomness_of(6), restrictions_of(6)
    together = assert_same_tokens(logits, randomness, restrictions)
    for row in range(6):
        of_row = (type(values)(*(value[row : row + 1] for value in values)) for values in (randomness, restrictions))
        assert assert_same_tokens(logits[row : row + 1], *of_row).item() == together[row]


def test_no_rows() -> None:
    for args in ((), (randomness_of(0),), (randomness_of(0), restrictions_of(0))):
        assert assert_same_tokens(torch.empty(0, 50), *args).tolist() == []
