"""Logits → tokens: greedy, temperature, min-p, top-k, top-p, with randomness that belongs to the request alone.

The noise of a row is a hash of the request's seed, the position and the vocabulary index (SplitMix64, Steele et al.
2014) turned into Gumbel noise, so that an argmax draws from the softmax (the Gumbel-max trick). No generator has a
state: preemption, batch mates and the device change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine_core.request import Request

_MASK_64 = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
# Sorting a whole vocabulary costs as much as the model's step; nearly always these many tokens decide.
_FIRST_LOOK = 1024


def sample(logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    """The next token of each request.

    Args:
        logits: `[len(requests), vocab_size]`, any float dtype.

    Temperature 0 takes the highest logit, the lowest id among equals. Otherwise temperature comes first, then min-p,
    which keeps the tokens at least `min_p` times as likely as the likeliest, then top-k, then top-p, which keeps the
    fewest tokens whose probabilities reach `top_p`; among equal logits the lower id is kept first. A logit of −inf is
    never drawn; every row has one that is not.
    """
    # Not `argmax`, which takes four times as long over a bfloat16 row; both give the first of equals.
    tokens = logits.max(dim=-1).indices
    random_rows = [row for row, request in enumerate(requests) if request.sampling_params.temperature > 0]
    if random_rows:
        drawn = _draw(logits[random_rows].float(), [requests[row] for row in random_rows])
        tokens[random_rows] = drawn
    return tokens.tolist()


def _draw(logits: torch.Tensor, requests: list[Request]) -> torch.Tensor:
    params = [request.sampling_params for request in requests]
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float64)
    # Shifted to a maximum of 0, a tiny temperature makes −inf of the others, never NaN.
    logits = logits - logits.amax(dim=-1, keepdim=True)
    logits = (logits.double() / temperature.to(logits.device)[:, None]).float()
    if any(p.min_p > 0 for p in params):
        lowest = torch.tensor([p.min_p for p in params], dtype=torch.float64).log().float().to(logits.device)
        logits.masked_fill_(logits < lowest[:, None], float("-inf"))
    noise = gumbel_noise(
        [request.seed for request in requests],
        [request.num_tokens for request in requests],
        logits.shape[-1],
        logits.device,
    )
    restricted = [row for row, p in enumerate(params) if p.top_k > 0 or p.top_p < 1]
    if restricted:
        logits[restricted] = _restrict(
            logits[restricted],
            torch.tensor([params[row].top_k for row in restricted], device=logits.device),
            torch.tensor([params[row].top_p for row in restricted], dtype=torch.float64, device=logits.device),
        )
    return (logits + noise).argmax(dim=-1)


def _restrict(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """`logits` with −inf at every token that `top_k` (0 is off) or then `top_p` (1 is off) excludes."""
    vocab_size = logits.shape[-1]
    num_kept = _count_kept(logits, top_k, top_p, min(_FIRST_LOOK, vocab_size))
    if num_kept is None:
        num_kept = _count_kept(logits, top_k, top_p, vocab_size)
    assert num_kept is not None
    lowest_kept = logits.topk(int(num_kept.max())).values.gather(-1, num_kept[:, None] - 1)
    higher = logits > lowest_kept
    equal = logits == lowest_kept
    # Equals are let in by id until the count is reached.
    kept = higher | (equal & (equal.cumsum(dim=-1) <= (num_kept - higher.sum(dim=-1))[:, None]))
    return logits.masked_fill(~kept, float("-inf"))


def _count_kept(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, width: int) -> torch.Tensor | None:
    """How many of each row's highest tokens stay, looking only at the `width` highest; None if that is not enough."""
    highest = logits.topk(width).values.double()
    rank = torch.arange(width, device=logits.device)
    in_top_k = (top_k[:, None] == 0) | (rank < top_k[:, None])
    weights = highest.exp().masked_fill(~in_top_k, 0.0)
    total = torch.where(top_k > 0, weights.sum(dim=-1), logits.double().exp().sum(dim=-1))
    before = weights.cumsum(dim=-1) - weights
    # The first token always stays: nothing comes before it. With top_p 1 rounding must not cut the tail.
    in_top_p = (top_p[:, None] >= 1) | (before < top_p[:, None] * total[:, None])
    num_kept = (in_top_k & in_top_p).sum(dim=-1)
    if width < logits.shape[-1] and bool((num_kept == width).any() | (top_k > width).any()):
        return None
    return num_kept


def gumbel_noise(seeds: Sequence[int], positions: Sequence[int], vocab_size: int, device: torch.device) -> torch.Tensor:
    """Float64 `[len(seeds), vocab_size]`; entry `[i, v]` depends on `seeds[i]`, `positions[i]` and `v` only."""
    keys = [_as_int64(_mix_int(_mix_int(seed) ^ position)) for seed, position in zip(seeds, positions, strict=True)]
    counter = torch.arange(1, vocab_size + 1, dtype=torch.int64, device=device) * _as_int64(_GOLDEN_GAMMA)
    bits = _mix(torch.tensor(keys, dtype=torch.int64, device=device)[:, None] + counter)
    # 53 bits, shifted by half a step: never 0, never 1.
    uniform = _shift_right(bits, 11).double().add_(0.5).mul_(2.0**-53)
    return uniform.log_().neg_().log_().neg_()


def _mix(z: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer on int64 bit patterns: the products wrap around."""
    z = (z ^ _shift_right(z, 30)) * _as_int64(_MULTIPLIER_1)
    z = (z ^ _shift_right(z, 27)) * _as_int64(_MULTIPLIER_2)
    return z ^ _shift_right(z, 31)


def _mix_int(value: int) -> int:
    z = (value + _GOLDEN_GAMMA) & _MASK_64
    z = ((z ^ (z >> 30)) * _MULTIPLIER_1) & _MASK_64
    z = ((z ^ (z >> 27)) * _MULTIPLIER_2) & _MASK_64
    return z ^ (z >> 31)


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Without copies of the sign bit, which int64 shifts bring in."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _as_int64(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
