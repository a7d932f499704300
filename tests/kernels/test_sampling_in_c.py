"""What is sampled in C is what torch samples, token for token, and restricted to the same tokens."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import pytest
import torch

from kernels import dispatch, sampling_in_c
from kernels.dispatch import computed_by, library_for
from kernels.gumbel import gumbel_noise
from kernels.restrict import Kept, Restrictions, restrict
from kernels.sample_tokens import Randomness, sample_tokens

from .libraries import each_library
from .tensors import strided

# One token, a vector more or less than whole, a chunk more or less, and several.
VOCAB_SIZES = [1, 2, 7, 65, 1025, 8191, 8192, 8193, 20_011]
ROWS = 9

dtype = each_library(dispatch)
pytestmark = pytest.mark.usefixtures("two_threads")


def random_rows(vocab_size: int, dtype: torch.dtype, scale: float = 3.0) -> torch.Tensor:
    return strided((torch.randn(ROWS, vocab_size) * scale).to(dtype))


def rows_of_equals(vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Few values, both zeros among them, and some −inf."""
    logits = torch.randn(ROWS, vocab_size).mul(2).round().div(2)
    logits[:, 1::3].neg_()
    logits[:, 3::5] = float("-inf")
    return strided(logits.to(dtype))


def rows_that_differ_little(vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    """In float32 only by the last bits, positive and negative."""
    sign = torch.tensor([1.0, -1.0, 1e-3] * (ROWS // 3))[:, None]
    return strided((sign * (1 + torch.rand(ROWS, vocab_size) * 1e-3)).to(dtype))


def randomness_of(num_rows: int = ROWS, temperature: float | None = None) -> Randomness:
    """Every fourth row is greedy unless all have one temperature."""
    temperatures = torch.rand(num_rows) * 1.5 + 0.1 if temperature is None else torch.full((num_rows,), temperature)
    if temperature is None:
        temperatures[::4] = 0
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,))
    return Randomness(temperatures, seeds, torch.randint(1, 10**5, (num_rows,)))


def restrictions_of(num_rows: int = ROWS) -> Restrictions:
    """Each of them off in about half of the rows."""

    def sometimes(values: torch.Tensor, off: float) -> torch.Tensor:
        return torch.where(torch.rand(num_rows) < 0.5, values, torch.tensor(off, dtype=values.dtype))

    top_k = torch.tensor([1, 2, 50, 3000, 2**31 - 1])[torch.randint(5, (num_rows,))]
    top_p = torch.rand(num_rows, dtype=torch.float64)
    min_p = torch.rand(num_rows, dtype=torch.float64) ** 4
    return Restrictions(sometimes(top_k, 0), sometimes(top_p, 1.0), sometimes(min_p, 0.0))


def assert_same_tokens(logits: torch.Tensor, *args: Randomness | Restrictions | None) -> list[int]:
    assert library_for(logits) is not None
    with computed_by("torch"):
        expected = sample_tokens(logits, *args)
    tokens = sample_tokens(logits, *args)
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == expected.tolist()
    return tokens.tolist()


def assert_same_kept(logits: torch.Tensor, temperature: torch.Tensor, restrictions: Restrictions) -> torch.Tensor:
    highest = logits.amax(-1).float()
    with computed_by("torch"):
        expected = is_kept(logits, restrict(logits, highest, temperature, restrictions))
    kept = restrict(logits, highest, temperature, restrictions)
    assert kept.threshold.dtype == torch.float32 and kept.last_equal.dtype == torch.int64
    assert torch.equal(is_kept(logits, kept), expected)
    return expected


def is_kept(logits: torch.Tensor, kept: Kept) -> torch.Tensor:
    threshold, last_equal = kept.threshold[:, None], kept.last_equal[:, None]
    is_in = (logits > threshold) | ((logits == threshold) & (torch.arange(logits.shape[-1]) <= last_equal))
    return is_in & (logits > float("-inf"))


@pytest.mark.parametrize("make_rows", [random_rows, rows_of_equals, rows_that_differ_little])
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_tokens_are_those_of_torch(
    dtype: torch.dtype, vocab_size: int, make_rows: Callable[[int, torch.dtype], torch.Tensor]
) -> None:
    logits = make_rows(vocab_size, dtype)
    assert_same_tokens(logits)
    for _ in range(3):
        randomness, restrictions = randomness_of(), restrictions_of()
        assert_same_tokens(logits, randomness)
        assert_same_tokens(logits, randomness, restrictions)
        assert_same_kept(logits, randomness.temperature, restrictions)


@pytest.mark.parametrize("temperature", [1e-44, 1e-37, 1e-3, 50.0, 1e30])
def test_extreme_temperatures(dtype: torch.dtype, temperature: float) -> None:
    for logits in (random_rows(9001, dtype), random_rows(9001, dtype, scale=1e30), rows_of_equals(9001, dtype)):
        randomness, restrictions = randomness_of(temperature=temperature), restrictions_of()
        tokens = assert_same_tokens(logits, randomness)
        assert_same_tokens(logits, randomness, restrictions)
        assert_same_kept(logits, randomness.temperature, restrictions)
        if temperature < 1e-30:
            assert torch.equal(logits[torch.arange(ROWS), tokens], logits.amax(-1))


@pytest.mark.parametrize(
    ("setting", "num_kept"),
    [
        ((1, 1.0, 0.0), 1),
        ((0, 1e-30, 0.0), 1),
        ((0, 0.25, 0.0), 2500),
        ((8200, 1.0, 0.0), 8200),
        ((8000, 0.5, 0.9), 4000),
        ((10_000, 1.0, 0.0), 10_000),
        ((0, 0.9999, 1.0), 9999),
        ((0, 1.0, 1.0), 10_000),
    ],
)
@pytest.mark.parametrize("value", [0.0, -0.0, 5.0, -3.0])
def test_equals_are_let_in_from_the_lowest_id(
    dtype: torch.dtype, value: float, setting: tuple[int, float, float], num_kept: int
) -> None:
    logits = torch.full((1, 10_001), value, dtype=dtype)
    if value == 0:  # of both signs
        logits[0, :100:2] = -value
    logits[0, 7] = float("-inf")
    top_k, top_p, min_p = setting
    restrictions = Restrictions(
        torch.tensor([top_k]), torch.tensor([top_p], dtype=torch.float64), torch.tensor([min_p], dtype=torch.float64)
    )
    kept = assert_same_kept(logits, torch.ones(1), restrictions)
    assert kept[0].nonzero().flatten().tolist() == [i for i in range(10_001) if i != 7][:num_kept]


def test_a_logit_of_minus_infinity_is_never_drawn(dtype: torch.dtype) -> None:
    logits = torch.full((8, 8300), float("-inf"), dtype=dtype)
    places = torch.arange(8) * 1170
    logits[torch.arange(8), places] = torch.randn(8).to(dtype)
    for randomness in (randomness_of(8), randomness_of(8, 1e30)):
        for restrictions in (None, restrictions_of(8)):
            assert assert_same_tokens(logits, randomness, restrictions) == places.tolist()


def test_the_first_of_equals_is_taken_where_nothing_is_random(dtype: torch.dtype) -> None:
    logits = torch.full((4, 20_000), -1.0, dtype=dtype)
    logits[1, [15_000, 14_999, 19_000]] = 1
    logits[2, [3, 9]] = torch.tensor([-0.0, 0.0], dtype=dtype)
    logits[3] = float("-inf")
    assert assert_same_tokens(logits) == [0, 14_999, 3, 0]


def test_float32_does_not_decide(dtype: torch.dtype) -> None:
    """Two tokens in different chunks, their scores as close as their logits can bring them."""
    randomness = randomness_of(64, 1.0)
    noise = gumbel_noise(randomness.seeds[:, None], randomness.positions[:, None], torch.arange(9000))
    logits = torch.full((64, 9000), float("-inf"), dtype=dtype)
    logits[:, 3] = 0
    logits[:, 8400] = (noise[:, 3] - noise[:, 8400]).to(dtype)
    assert set(assert_same_tokens(logits, randomness)) == {3, 8400}


def test_no_winner_is_passed_over(dtype: torch.dtype) -> None:
    """Among equals some winners are only just better than the best before them."""
    assert_same_tokens(torch.zeros(1, 1000, dtype=dtype).expand(2000, -1), randomness_of(2000, 1.0))


@pytest.mark.parametrize("token", [0, 8, 15, 8191, 8200])
def test_the_largest_noise_there_is_wins_by_a_hundredth(dtype: torch.dtype, token: int) -> None:
    """Its bits are all ones; what it beats is barely less, and some forty below the highest logit it is far down."""
    logits = torch.full((1, 8201), float("-inf"), dtype=dtype)
    randomness = Randomness(torch.ones(1), torch.tensor([seed_with_ones_at(token)]), torch.tensor([5]))
    other = 4100
    noise = gumbel_noise(randomness.seeds, randomness.positions, torch.tensor([token, other]))
    assert noise[0] > 36.7
    logits[0, other] = 0
    lead = noise[0] - noise[1]
    for logit, winner in ((-lead + 0.2, token), (-lead - 0.2, other)):
        logits[0, token] = logit
        assert assert_same_tokens(logits, randomness) == [winner]


def seed_with_ones_at(token: int) -> int:
    """The seed that has all bits of this token set, at position 5: SplitMix64 backwards."""
    mask, gamma = 2**64 - 1, 0x9E3779B97F4A7C15

    def unshift(z: int, bits: int) -> int:
        return z ^ (z >> bits) ^ (z >> 2 * bits)

    def unmix(z: int) -> int:
        z = unshift(z, 31) * pow(0x94D049BB133111EB, -1, 2**64) & mask
        z = unshift(z, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) & mask
        return unshift(z, 30)

    key = (unmix(mask) - (token + 1) * gamma) & mask
    seed = (unmix(((unmix(key) - gamma) & mask) ^ 5) - gamma) & mask
    return seed - 2**64 if seed >> 63 else seed


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_a_row_depends_on_itself_alone(dtype: torch.dtype, num_threads: int) -> None:
    logits, randomness, restrictions = random_rows(20_011, dtype), randomness_of(), restrictions_of()
    torch.set_num_threads(1)
    alone = []
    for row in range(ROWS):
        of_row = (type(values)(*(value[row : row + 1] for value in values)) for values in (randomness, restrictions))
        alone += sample_tokens(logits[row : row + 1], *of_row).tolist()
    torch.set_num_threads(num_threads)
    assert sample_tokens(logits, randomness, restrictions).tolist() == alone


def test_several_threads_sample_at_once(dtype: torch.dtype) -> None:
    logits, randomness, restrictions = random_rows(9000, dtype), randomness_of(), restrictions_of()
    expected = assert_same_tokens(logits, randomness, restrictions)
    results: list[list[int]] = []

    def repeat() -> None:
        results.extend(sample_tokens(logits, randomness, restrictions).tolist() for _ in range(20))

    threads = [threading.Thread(target=repeat) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 60


def test_tables_are_left_empty(dtype: torch.dtype) -> None:
    for logits in (random_rows(9000, dtype), rows_of_equals(9000, dtype), random_rows(9000, dtype, scale=1e30)):
        logits[0, 5:9] = torch.tensor([math.inf, math.nan, -math.nan, -math.inf], dtype=dtype)
        sample_tokens(logits, randomness_of(temperature=1.0), restrictions_of())
        assert not sampling_in_c._kept_tables.of[dtype].any()


def test_what_is_not_a_number_is_not_chosen_beside_numbers(dtype: torch.dtype) -> None:
    logits = random_rows(9000, dtype)
    logits[:, ::2] = math.nan
    for args in ((), (randomness_of(),), (randomness_of(), restrictions_of())):
        assert all(token % 2 for token in sample_tokens(logits, *args).tolist())
    assert sample_tokens(torch.full_like(logits, math.nan), randomness_of()).max() < 9000


def test_columns_need_not_be_contiguous(dtype: torch.dtype) -> None:
    logits = torch.randn(9000, ROWS).to(dtype).T
    randomness, restrictions = randomness_of(), restrictions_of()
    assert_same_tokens(logits, randomness, restrictions)
    assert_same_tokens(logits[:1].expand(ROWS, -1), randomness, restrictions)
    one_for_all = Randomness(*(values[:1].expand(ROWS) for values in randomness_of(temperature=0.7)))
    assert_same_tokens(logits, one_for_all, restrictions)


def test_no_rows(dtype: torch.dtype) -> None:
    logits = torch.empty(0, 50, dtype=dtype)
    assert sample_tokens(logits).tolist() == []
    assert sample_tokens(logits, randomness_of(0), restrictions_of(0)).tolist() == []
    assert len(restrict(logits, torch.empty(0), torch.empty(0), restrictions_of(0)).threshold) == 0


def test_other_types_are_for_torch(dtype: torch.dtype) -> None:
    assert library_for(torch.zeros(1, dtype=torch.float16)) is None
    with computed_by("torch"):
        assert library_for(torch.zeros(1, dtype=dtype)) is None
