"""Sampling follows the distribution asked for, and depends on nothing but the request."""

from __future__ import annotations

import math

import pytest
import torch

from tests.model.sampling import chi_square_p_value, make_request, sampled

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 1.5, -3.0])


def counts(logits: torch.Tensor, num_draws: int, **params: float) -> torch.Tensor:
    """How often each token came out, over `num_draws` fixed seeds."""
    requests = [make_request(seed=seed, **params) for seed in range(num_draws)]
    tokens = sampled(logits.expand(num_draws, -1), requests)
    return torch.bincount(torch.tensor(tokens), minlength=logits.shape[-1])


def test_the_p_value_is_the_textbook_one() -> None:
    # 95 % quantile of chi-square with 3 degrees of freedom: 7.815
    observed, expected = torch.tensor([110.0, 90, 100, 100]), torch.full((4,), 100.0)
    scaled = expected + (observed - expected) * math.sqrt(7.8147 / 2)
    assert chi_square_p_value(scaled, expected) == pytest.approx(0.05, abs=1e-4)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(-1) * 20_000
    assert chi_square_p_value(counts(LOGITS, 20_000, temperature=temperature), expected) > 1e-4


def test_positions_are_as_good_as_seeds() -> None:
    """One request's successive draws are independent of each other."""
    requests = [make_request([1] * (1 + i), seed=7) for i in range(2_000)]
    tokens = torch.tensor(sampled(LOGITS.expand(2_000, -1), requests))
    expected = LOGITS.softmax(-1)
    assert chi_square_p_value(torch.bincount(tokens, minlength=8), expected * 2_000) > 1e-4
    pairs = torch.bincount(tokens[:-1] * 8 + tokens[1:], minlength=64)
    likely = (torch.outer(expected, expected) * 1_999).flatten()
    enough = likely >= 5
    folded = torch.cat([pairs[enough], pairs[~enough].sum()[None]])
    assert chi_square_p_value(folded, torch.cat([likely[enough], likely[~enough].sum()[None]])) > 1e-4


def test_top_k_keeps_the_k_highest() -> None:
    kept = torch.tensor([True, True, False, False, False, False, True, False])
    expected = LOGITS.masked_fill(~kept, -math.inf).softmax(-1) * 10_000
    assert chi_square_p_value(counts(LOGITS, 10_000, top_k=3), expected) > 1e-4


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    for top_p, kept in [(0.5, [1]), (0.51, [1, 3]), (0.75, [1, 3]), (0.76, [1, 2, 3]), (1.0, [0, 1, 2, 3])]:
        observed = counts(logits, 2_000, top_p=top_p)
        assert observed.nonzero().flatten().tolist() == kept


def test_temperature_comes_before_top_p() -> None:
    """At a high temperature the same `top_p` lets more tokens through."""
    logits = torch.tensor([0.6, 0.3, 0.1]).log()
    assert (counts(logits, 500, top_p=0.6, temperature=1.0) > 0).tolist() == [True, False, False]
    assert (counts(logits, 500, top_p=0.6, temperature=10.0) > 0).tolist() == [True, True, False]


def test_top_k_comes_before_top_p() -> None:
    """Of two kept tokens the first has more than 0.6; of all it would have had 0.5."""
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    assert (counts(logits, 500, top_p=0.6) > 0).tolist() == [True, True, False]
    assert (counts(logits, 500, top_p=0.6, top_k=2) > 0).tolist() == [True, False, False]


def test_min_p_is_relative_to_the_likeliest() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    for min_p, kept in [(0.0, [0, 1, 2, 3]), (0.09, [0, 1, 2, 3]), (0.11, [0, 1, 2]), (0.59, [0, 1]), (0.61, [0])]:
        assert counts(logits, 1_000, min_p=min_p).nonzero().flatten().tolist() == kept
    assert counts(torch.zeros(4), 500, min_p=1.0).nonzero().flatten().tolist() == [0, 1, 2, 3]


def test_temperature_comes_before_min_p() -> None:
    """At a high temperature the same `min_p` lets more tokens through."""
    logits = torch.tensor([0.6, 0.3, 0.1]).log()
    assert (counts(logits, 500, min_p=0.4, temperature=1.0) > 0).tolist() == [True, True, False]
    assert (counts(logits, 500, min_p=0.4, temperature=10.0) > 0).tolist() == [True, True, True]


def test_min_p_comes_before_top_p() -> None:
    """Of two kept tokens the first has more than 0.6; of all it would have had 0.5."""
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    assert (counts(logits, 500, top_p=0.6, min_p=0.5) > 0).tolist() == [True, False, False]


def test_equal_logits_are_kept_from_the_lowest_id() -> None:
    logits = torch.zeros(1000)
    assert counts(logits, 500, top_k=3).nonzero().flatten().tolist() == [0, 1, 2]
    assert counts(logits, 500, top_p=0.002).nonzero().flatten().tolist() == [0, 1]


def test_wide_settings_look_at_the_whole_vocabulary() -> None:
    """More candidates than are looked at first: a flat distribution, and a large `top_k`."""
    num_draws, vocab_size = 1_000, 5_000
    logits = torch.zeros(vocab_size)
    assert max(counts(logits, num_draws, top_p=0.5).nonzero().flatten().tolist()) in range(2_400, 2_500)
    assert max(counts(logits, num_draws, top_k=4_000).nonzero().flatten().tolist()) in range(3_900, 4_000)
    assert max(counts(logits, num_draws, top_k=4_000, top_p=0.5).nonzero().flatten().tolist()) in range(1_900, 2_000)
    assert max(counts(logits, num_draws, top_k=1_000_000).nonzero().flatten().tolist()) in range(4_900, 5_000)


@pytest.mark.parametrize(
    "params", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-30}, {"temperature": 0.0}]
)
def test_the_narrowest_settings_are_greedy(params: dict[str, float]) -> None:
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(0))
    requests = [make_request(seed=seed, **params) for seed in range(50)]
    assert sampled(logits, requests) == logits.argmax(-1).tolist()


def test_a_seed_decides_whatever_the_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(6, 500, generator=generator)
    requests = [
        make_request([1] * 9, seed=3),
        make_request(seed=4, temperature=0.0),
        make_request(seed=5, top_p=0.8),
        make_request([1] * 9, seed=3, top_k=20),
        make_request(seed=6, temperature=3.0, top_k=100, top_p=0.9),
        make_request(seed=-(2**63)),
    ]
    together = sampled(rows, requests)
    alone = [sampled(rows[i : i + 1], [request])[0] for i, request in enumerate(requests)]
    backwards = sampled(rows.flip(0), requests[::-1])[::-1]
    assert together == alone == backwards


def test_seed_and_position_both_matter() -> None:
    logits = torch.zeros(1, 10_000)
    requests = [make_request([1] * position, seed=seed) for seed in range(10) for position in range(1, 11)]
    assert len(set(sampled(logits.expand(100, -1), requests))) > 90
