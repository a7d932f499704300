"""Requests → tokens: what each of them asks of `kernels.sample_tokens`, as tensors.

A request's randomness is a matter of its seed and the position alone: preemption, batch mates and the device change
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine_core.request import Request
from kernels.restrict import Restrictions
from kernels.sample_tokens import Randomness, sample_tokens


def sample(logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    """The next token of each request, as `sample_tokens` defines it.

    Args:
        logits: `[len(requests), vocab_size]`, any float dtype.
    """
    params = [request.sampling_params for request in requests]
    if all(p.temperature == 0 for p in params):
        return sample_tokens(logits).tolist()
    temperature, top_p, min_p = torch.tensor(
        [[p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]], dtype=torch.float64
    ).to(logits.device)
    seeds, positions, top_k = torch.tensor(
        [
            [request.seed for request in requests],
            [request.num_tokens for request in requests],
            [p.top_k for p in params],
        ],
        dtype=torch.int64,
    ).to(logits.device)
    is_restricted = any(p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0) for p in params)
    return sample_tokens(
        logits,
        Randomness(temperature.float(), seeds, positions),
        Restrictions(top_k, top_p, min_p) if is_restricted else None,
    ).tolist()
