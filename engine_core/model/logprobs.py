"""Log-probabilities of tokens, sampled or given, from the raw logits: before any rule, temperature or truncation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine_core.request import Request
from engine_core.runner import ScheduledRequest
from ipc.messages import TokenLogprob

# Prompt tokens whose logits exist at once: about what a decode step of many requests has.
_ROWS_AT_ONCE = 64


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top_tokens: Sequence[int]) -> list[TokenLogprob]:
    """One entry per row of `logits` `[num_rows, vocab_size]`, computed in float32.

    Args:
        token_ids: `[num_rows]`, the token each row is asked for.
        num_top_tokens: `[num_rows]`, how many of the row's likeliest tokens to list, the lower id first among equals.

    A rank is 1 plus the number of likelier tokens: equals share it.
    """
    logits = logits.float()
    normalizer = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(-1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks = ((logits > chosen).sum(dim=-1) + 1).tolist()
    top_ids = _likeliest(logits, max(num_top_tokens))
    top_logprobs = (logits.gather(-1, top_ids) - normalizer).tolist()
    chosen_logprobs = (chosen - normalizer).squeeze(-1).tolist()
    return [
        TokenLogprob(token_id, logprob, rank, list(zip(ids[:num_top], values[:num_top], strict=True)))
        for token_id, logprob, rank, ids, values, num_top in zip(
            token_ids, chosen_logprobs, ranks, top_ids.tolist(), top_logprobs, num_top_tokens, strict=True
        )
    ]


def _likeliest(logits: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Ids `[num_rows, num_tokens]` of the highest float32 logits, the lower id first among equals, as in an argmax.

    Equals are common in bfloat16, and `topk` promises no order among them: it gets integers without any.
    """
    bits = logits.contiguous().view(torch.int32)
    # Ordered as the floats are: those of negative floats run backwards.
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return ((ordered << 32) - ids).topk(min(num_tokens, logits.shape[-1])).indices


def sampled_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], requests: Sequence[Request]
) -> dict[int, TokenLogprob]:
    """Of what was sampled from each row of the raw `logits` `[len(requests), vocab_size]`: by row, where asked for."""
    wanted = {
        row: request.sampling_params.logprobs
        for row, request in enumerate(requests)
        if request.sampling_params.logprobs is not None
    }
    if not wanted:
        return {}
    rows = list(wanted)
    entries = token_logprobs(logits[rows], [token_ids[row] for row in rows], list(wanted.values()))
    return dict(zip(rows, entries, strict=True))


def prompt_logprobs(
    batch: Sequence[ScheduledRequest], logits_of: Callable[[torch.Tensor], torch.Tensor], device: torch.device
) -> dict[int, list[TokenLogprob]]:
    """Of the prompt tokens this step's tokens predict, by place in the batch: an entry for each request that collects.

    Args:
        logits_of: places in the flattened batch, a tensor on `device` → their raw logits `[num_places, vocab_size]`.
    """
    places: list[int] = []
    token_ids: list[int] = []
    num_top_tokens: list[int] = []
    num_predicted: dict[int, int] = {}
    first_place = 0
    for index, item in enumerate(batch):
        request = item.request
        if request.prompt_logprobs is not None:
            # The last prompt token predicts the first of the output.
            predicted = request.token_ids[item.start + 1 : item.start + item.num_tokens + 1][
                : request.num_prompt_tokens - item.start - 1
            ]
            places += range(first_place, first_place + len(predicted))
            token_ids += predicted
            num_top_tokens += [request.sampling_params.prompt_logprobs or 0] * len(predicted)
            num_predicted[index] = len(predicted)
        first_place += item.num_tokens

    entries: list[TokenLogprob] = []
    for first in range(0, len(places), _ROWS_AT_ONCE):
        part = slice(first, first + _ROWS_AT_ONCE)
        logits = logits_of(torch.tensor(places[part], device=device))
        entries += token_logprobs(logits, token_ids[part], num_top_tokens[part])
    remaining = iter(entries)
    return {index: [next(remaining) for _ in range(count)] for index, count in num_predicted.items()}
