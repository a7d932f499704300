"""Noise is a function of seed, position and token: the same numbers for ever, in torch and in Triton."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.gumbel import ROUGH_ERROR, exact_noise, gumbel_noise, random_bits, rough_noise
from kernels.triton_language import jit, tl
from tests.kernels.interpreted import poisoned

SEEDS = torch.tensor([0, 42, -1, 2**63 - 1, -(2**63)])
POSITIONS = torch.tensor([0, 7, 2**31, 1, 12345])


def of_rows(num_tokens: int) -> torch.Tensor:
    return gumbel_noise(SEEDS[:, None], POSITIONS[:, None], torch.arange(num_tokens))


def test_it_has_the_moments_of_a_gumbel_distribution() -> None:
    noise = of_rows(50_000)
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)


def test_it_stays_what_it_is() -> None:
    """A seed given today must mean the same tomorrow, so the numbers are written down: SplitMix64, worked out in
    Python integers."""
    mask = 2**64 - 1

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    gamma = 0x9E3779B97F4A7C15
    for row, seed, position in zip(of_rows(5).tolist(), SEEDS.tolist(), POSITIONS.tolist(), strict=True):
        key = mix(((mix((seed + gamma) & mask) ^ position) + gamma) & mask)
        expected = []
        for index in range(5):
            bits = mix((key + (index + 1) * gamma) & mask)
            expected.append(-math.log(-math.log(((bits >> 11) + 0.5) * 2.0**-53)))
        assert row == pytest.approx(expected, rel=1e-12)


@jit
def noise_of_rows(exact, rough, seeds, positions, NUM_TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    tokens = tl.arange(0, NUM_TOKENS)
    bits = random_bits(tl.load(seeds + row), tl.load(positions + row), tokens)
    tl.store(exact + row * NUM_TOKENS + tokens, exact_noise(bits))
    tl.store(rough + row * NUM_TOKENS + tokens, rough_noise(bits))


@jit
def noise_of_bits(exact, rough, bits, NUM_BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, NUM_BITS)
    tl.store(exact + places, exact_noise(tl.load(bits + places)))
    tl.store(rough + places, rough_noise(tl.load(bits + places)))


def test_triton_computes_the_same() -> None:
    exact, rough = poisoned(5, 4096, dtype=torch.float64), poisoned(5, 4096)
    noise_of_rows[(5,)](exact, rough, SEEDS, POSITIONS, NUM_TOKENS=4096)
    torch.testing.assert_close(exact, of_rows(4096), rtol=1e-14, atol=1e-14)
    # Much better than promised: the interpreter's logarithm is no GPU's.
    assert (rough - exact).abs().max() < ROUGH_ERROR / 16


def test_rough_noise_is_close_at_both_ends() -> None:
    """Where u is next to 0 and to 1, and around the places where the formula changes."""
    edges = [0, 2**46, 2**52, 2**53 - 2**47, 2**53 - 2**20, 2**53 - 2]
    bits = torch.tensor([edge + i for edge in edges for i in (-1, 0, 1)][1:] + list(range(15)))
    exact, rough = poisoned(32, dtype=torch.float64), poisoned(32)
    noise_of_bits[(1,)](exact, rough, bits, NUM_BITS=32)
    assert exact.isfinite().all() and exact.max() > 36
    assert (rough - exact).abs().max() < ROUGH_ERROR / 16
