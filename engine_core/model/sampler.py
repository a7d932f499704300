"""Requests → tokens: what each of them asks of `kernels.sample_tokens`, as tensors.

A request's randomness is a matter of its seed and the position alone: preemption, batch mates and the device change
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine_core.runner import ScheduledRequest
from kernels.restrict import Restrictions
from kernels.sample_tokens import Randomness, sample_tokens

from .staging import Staging


def sample(logits: torch.Tensor, batch: Sequence[ScheduledRequest], staging: Staging) -> torch.Tensor:
    """The next token of each request, as `sample_tokens` defines it: int64 `[len(batch)]`, on the device.

    Args:
        logits: `[len(batch), vocab_size]`, any float dtype.
    """
    params = [item.request.sampling_params for item in batch]
    if all(p.temperature == 0 for p in params):
        return sample_tokens(logits)
    temperature, seeds, positions, top_k, top_p, min_p = staging.upload(
        np.array([p.temperature for p in params], dtype=np.float32),
        np.array([item.request.seed for item in batch], dtype=np.int64),
        np.array([item.end for item in batch], dtype=np.int64),
        np.array([p.top_k for p in params], dtype=np.int64),
        np.array([p.top_p for p in params], dtype=np.float64),
        np.array([p.min_p for p in params], dtype=np.float64),
    )
    is_restricted = any(p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0) for p in params)
    return sample_tokens(
        logits,
        Randomness(temperature, seeds, positions),
        Restrictions(top_k, top_p, min_p) if is_restricted else None,
    )
