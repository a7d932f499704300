"""The rules a request puts on its logits are those of `SamplingParams`, for every row of a batch on its own."""

from __future__ import annotations

import gc
import math
import random
from typing import Any

import pytest
import torch

from engine_core.model.logit_rules import LogitRules
from engine_core.request import Request
from ipc.vocabulary import SamplingParams
from tests.model.sampling import (
    apply_rules,
    chi_square_p_value,
    make_request,
    reference_logits,
    reference_probabilities,
    sampled,
)

VOCAB_SIZE = 40
EOS = frozenset({2, 3})
PROMPT = [5, 6, 7, 5, 9, 8]
OUTPUT = [10, 5, 10, 11, 10, 6]

ONE_RULE: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": {4: 3.5, 10: -100.0, 39: 100.0}},
    "allowed": {"allowed_token_ids": (0, 5, 39)},
    "bad words of one token": {"bad_words_token_ids": ((5,), (12,))},
    "bad words of several": {"bad_words_token_ids": ((10, 6, 20), (6, 21), (11, 10, 22), (6, 6, 23), (5, 10, 6, 24))},
    "longer than the sequence": {"bad_words_token_ids": ((1, *PROMPT, *OUTPUT, 25), (*PROMPT, *OUTPUT, 26))},
    "min_tokens": {"min_tokens": 7, "stop_token_ids": (30, 31)},
    "min_tokens reached": {"min_tokens": 6, "stop_token_ids": (30, 31)},
    "min_tokens without eos": {"min_tokens": 7, "stop_token_ids": (30,), "ignore_eos": True},
    "stop token outside the vocabulary": {"min_tokens": 7, "stop_token_ids": (-1, VOCAB_SIZE, 2**70, 30)},
    "repetition": {"repetition_penalty": 1.7},
    "repetition rewarded": {"repetition_penalty": 0.6},
    "frequency": {"frequency_penalty": 1.3},
    "frequency rewarded": {"frequency_penalty": -0.7},
    "presence": {"presence_penalty": 0.9},
}
COMBINED: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    "bias before penalties": {"logit_bias": {10: 4.0, 5: -4.0}, "repetition_penalty": 2.0},
    "everything": {
        "logit_bias": {0: 1.0, 20: 5.0},
        "allowed_token_ids": tuple(range(30)),
        "bad_words_token_ids": ((6, 20), (4,)),
        "min_tokens": 10,
        "stop_token_ids": (0,),
        "repetition_penalty": 1.1,
        "presence_penalty": 1.0,
    },
    "nothing": {},
}
# What is left is decided by what is allowed.
IMPOSSIBLE: dict[str, dict[str, Any]] = {
    "all allowed are bad": {"allowed_token_ids": (5, 12), "bad_words_token_ids": ((5,), (6, 12))},
    "only the end is allowed, too early": {"allowed_token_ids": (2, 3), "min_tokens": 7},
    "everything is bad": {"bad_words_token_ids": tuple((i,) for i in range(VOCAB_SIZE))},
}
CASES = ONE_RULE | COMBINED | IMPOSSIBLE


def random_logits(num_rows: int) -> torch.Tensor:
    return 3 * torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(num_rows))


def check(ruled: torch.Tensor, logits: torch.Tensor, request: Request) -> None:
    expected = torch.tensor(reference_logits(logits.tolist(), request, EOS))
    torch.testing.assert_close(ruled, expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("params", CASES.values(), ids=CASES)
def test_a_rule_does_what_its_definition_says(params: dict[str, Any]) -> None:
    request = make_request(PROMPT, OUTPUT, **params)
    logits = random_logits(1)
    before = logits.clone()
    check(apply_rules(LogitRules(EOS), logits, [request])[0], logits[0], request)
    assert torch.equal(logits, before)


def test_the_cases_change_something() -> None:
    """Each of them but the neutral ones would fail if its rule were ignored."""
    logits = random_logits(1)[0].tolist()
    neutral = {"nothing", "min_tokens reached", "everything is bad"}
    for name, params in CASES.items():
        changed = reference_logits(logits, make_request(PROMPT, OUTPUT, **params), EOS) != logits
        assert changed == (name not in neutral), name


def test_rows_of_a_batch_have_nothing_to_do_with_each_other() -> None:
    requests = [make_request(PROMPT[: 1 + i % 6], OUTPUT, **params) for i, params in enumerate(CASES.values())]
    random.Random(0).shuffle(requests)
    logits = random_logits(len(requests))
    rules = LogitRules(EOS)
    for _ in range(2):  # the second time with what the first has prepared
        ruled = apply_rules(rules, logits, requests)
        for row, request in enumerate(requests):
            check(ruled[row], logits[row], request)


def test_rules_follow_a_sequence_as_it_grows() -> None:
    """Counts, tails and `min_tokens` are those of the moment, also after steps in which the request had no turn."""
    generator = random.Random(1)
    rules = LogitRules(EOS)
    requests = [
        make_request(
            PROMPT,
            repetition_penalty=1.5,
            frequency_penalty=0.5,
            presence_penalty=0.25 * i,
            bad_words_token_ids=((4, 6), (7, 7, 8), (5, 4, 4)),
            min_tokens=20,
        )
        for i in range(4)
    ]
    for _ in range(40):
        chosen = generator.sample(requests, generator.randint(1, 4))
        logits = random_logits(len(chosen))
        for row, request in zip(apply_rules(rules, logits, chosen), chosen, strict=True):
            check(row, logits[chosen.index(request)], request)
        for request in requests:
            request.token_ids.append(generator.randint(4, 8))


def test_another_continuation_of_a_prompt_counts_its_own_output() -> None:
    rules = LogitRules(EOS)
    parent = make_request(PROMPT, OUTPUT, frequency_penalty=1.0, n=2)
    logits = random_logits(2)
    apply_rules(rules, logits[:1], [parent])
    child = parent.fork(1)
    child.token_ids += [20, 20]
    ruled = apply_rules(rules, logits, [child, parent])
    check(ruled[0], logits[0], child)
    check(ruled[1], logits[1], parent)


def test_without_rules_nothing_is_copied() -> None:
    logits = random_logits(2).bfloat16()
    requests = [make_request(temperature=0.0), make_request(min_tokens=2, output=[1, 1], logprobs=3, top_p=0.5)]
    assert apply_rules(LogitRules(EOS), logits, requests) is logits


def test_a_rule_sees_bfloat16_logits_in_full_precision() -> None:
    """64.0 + 0.1 is 64.0 in bfloat16."""
    logits = torch.full((1, VOCAB_SIZE), 64.0, dtype=torch.bfloat16)
    request = make_request(temperature=0.0, logit_bias={17: 0.1})
    assert sampled(apply_rules(LogitRules(EOS), logits, [request]), [request]) == [17]


def test_what_is_prepared_dies_with_its_request() -> None:
    rules = LogitRules(EOS)
    request = make_request(repetition_penalty=2.0)
    apply_rules(rules, random_logits(1), [request])
    assert len(rules._prepared) == 1
    del request
    gc.collect()
    assert len(rules._prepared) == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": {7: 1e300}},
        {"logit_bias": dict.fromkeys(range(VOCAB_SIZE), -1e300) | {7: -1e299}, "allowed_token_ids": (7,)},
        {"repetition_penalty": 1e-300, "allowed_token_ids": (7, 8), "logit_bias": {8: -1e300}},
        {"repetition_penalty": 1e300, "logit_bias": {7: 100.0}},
        {"bad_words_token_ids": tuple((i,) for i in range(VOCAB_SIZE)), "allowed_token_ids": (7,)},
    ],
)
def test_the_most_extreme_settings_still_draw_a_token(params: dict[str, Any], temperature: float) -> None:
    """Numbers beyond float32, or nothing possible at all: still an ordinary token, and the one that was meant."""
    requests = [
        make_request([1], seed=seed, temperature=temperature, top_k=5, top_p=0.9, min_p=0.01, **params)
        for seed in range(20)
    ]
    ruled = apply_rules(LogitRules(EOS), random_logits(1).expand(20, -1), requests)
    assert not ruled.isnan().any()
    assert sampled(ruled, requests) == [7] * 20


def test_logits_of_minus_infinity_stay_impossible() -> None:
    logits = random_logits(1)
    logits[0, 1:] = -math.inf
    request = make_request([3, 4], repetition_penalty=1.5, frequency_penalty=-2.0, temperature=1.0)
    assert sampled(apply_rules(LogitRules(EOS), logits, [request]), [request]) == [0]


@pytest.mark.parametrize(
    "params",
    [
        {"min_p": 0.2},
        {"min_p": 0.2, "temperature": 2.0},
        {"min_p": 0.1, "top_k": 4},
        {"min_p": 0.1, "top_p": 0.7},
        {"min_p": 0.02, "top_k": 12, "top_p": 0.9, "temperature": 0.7},
        {"logit_bias": {3: 2.0, 9: -2.0}},
        {"logit_bias": {3: 2.0, 9: -2.0}, "top_k": 5},
        {"repetition_penalty": 1.5, "top_p": 0.8},
        {"frequency_penalty": 0.8, "presence_penalty": 0.5},
        {"frequency_penalty": 0.8, "presence_penalty": -0.5, "top_k": 6, "top_p": 0.9},
        {"allowed_token_ids": (2, 4, 5, 9, 10), "top_k": 4, "min_p": 0.05},
        {"bad_words_token_ids": ((6, 3), (4,)), "top_p": 0.9},
        {"min_tokens": 20, "top_k": 8, "temperature": 1.5},
    ],
    ids=str,
)
def test_draws_follow_the_reference_distribution(params: dict[str, Any]) -> None:
    num_draws, num_tokens = 10_000, 12
    logits = torch.randn(num_tokens, generator=torch.Generator().manual_seed(6))
    prompt, output = [5, 6, 7], [10, 5, 10, 6]
    requests = [make_request(prompt, output, seed=seed, **params) for seed in range(num_draws)]
    drawn = sampled(apply_rules(LogitRules(EOS), logits.expand(num_draws, -1), requests), requests)
    ruled = reference_logits(logits.tolist(), requests[0], EOS)
    expected = torch.tensor(reference_probabilities(ruled, SamplingParams(**params)), dtype=torch.float64)
    assert (expected > 0).sum() >= 3
    assert chi_square_p_value(torch.bincount(torch.tensor(drawn), minlength=num_tokens), expected * num_draws) > 1e-4
