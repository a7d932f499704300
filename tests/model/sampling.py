"""What sampling means, slowly and obviously in Python floats, and how to tell whether draws follow it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from engine_core.model.logit_rules import LogitRules
from engine_core.model.sampler import sample
from engine_core.model.staging import HostStaging
from engine_core.request import Request
from engine_core.runner import ScheduledRequest
from ipc.vocabulary import EngineRequest, SamplingParams


def make_request(
    prompt: Sequence[int] = (1, 1, 1, 1, 1), output: Sequence[int] = (), *, seed: int = 0, **params: object
) -> Request:
    source = EngineRequest("r", list(prompt), SamplingParams(**params))
    request = Request(source, max_tokens=1000, seed=seed, arrival_time_s=0.0)
    request.token_ids.extend(output)
    return request


def at_the_end(requests: Sequence[Request]) -> list[ScheduledRequest]:
    """Each as a step that computes its last token, and samples."""
    return [ScheduledRequest(request, request.num_tokens - 1, 1, (), 0) for request in requests]


def sampled(logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    return sample(logits, at_the_end(requests), HostStaging()).tolist()


def apply_rules(rules: LogitRules, logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    return rules.apply(logits, at_the_end(requests), HostStaging())


def reference_logits(logits: Sequence[float], request: Request, eos_token_ids: frozenset[int]) -> list[float]:
    """After the rules of `SamplingParams`, before temperature."""
    params = request.sampling_params
    tokens = request.token_ids
    output = tokens[request.num_prompt_tokens :]
    result = []
    for token_id, raw_logit in enumerate(logits):
        logit = raw_logit + params.logit_bias.get(token_id, 0.0)
        if token_id in tokens:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.frequency_penalty * output.count(token_id)
        logit -= params.presence_penalty * (token_id in output)
        result.append(logit)

    def is_allowed(token_id: int) -> bool:
        return params.allowed_token_ids is None or token_id in params.allowed_token_ids

    def is_forbidden(token_id: int) -> bool:
        sequence = [*tokens, token_id]
        completes = any(sequence[-len(word) :] == list(word) for word in params.bad_words_token_ids)
        ends = token_id in params.stop_token_ids or (token_id in eos_token_ids and not params.ignore_eos)
        return completes or (ends and len(output) < params.min_tokens)

    possible = {i for i in range(len(result)) if is_allowed(i) and not is_forbidden(i)}
    possible = possible or {i for i in range(len(result)) if is_allowed(i)}
    return [logit if i in possible else -math.inf for i, logit in enumerate(result)]


def reference_probabilities(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """Temperature, then min-p, top-k and top-p, of logits the rules have been applied to."""
    probabilities = _softmax([logit / params.temperature for logit in logits])
    least = params.min_p * max(probabilities)
    probabilities = _normalized([p if p >= least else 0.0 for p in probabilities])
    order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
    if params.top_k:
        probabilities = _normalized([p if i in order[: params.top_k] else 0.0 for i, p in enumerate(probabilities)])
    total = 0.0
    kept = []
    for token_id in order:
        if total < params.top_p:
            kept.append(token_id)
        total += probabilities[token_id]
    return _normalized([p if i in kept else 0.0 for i, p in enumerate(probabilities)])


def _softmax(logits: Sequence[float]) -> list[float]:
    return _normalized([math.exp(logit - max(logits)) for logit in logits])


def _normalized(weights: Sequence[float]) -> list[float]:
    return [weight / sum(weights) for weight in weights]


def chi_square_p_value(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """Upper tail of the chi-square distribution with `cells − 1` degrees of freedom; impossible cells must be empty."""
    assert observed[expected == 0].sum() == 0
    possible = expected > 0
    statistic = ((observed[possible] - expected[possible]) ** 2 / expected[possible]).sum().double()
    return torch.special.gammaincc((possible.sum() - 1).double() / 2, statistic / 2).item()
