"""Log-probabilities of tokens, sampled or given, from the raw logits: before any rule, temperature or truncation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from engine_core.runner import ScheduledRequest, StepResult
from ipc.messages import TokenLogprob

from .staging import Staging
from .step_outputs import StepOutputs

# Prompt tokens whose logits exist at once: about what a decode step of many requests has.
_ROWS_AT_ONCE = 64


class LogprobTensors(NamedTuple):
    """Of one token per row, `[num_rows]`, and of the row's likeliest ones, `[num_rows, num_top_tokens]`."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor


def logprob_tensors(logits: torch.Tensor, token_ids: torch.Tensor, num_top_tokens: int) -> LogprobTensors:
    """What `entries` makes readable, from `logits` `[num_rows, vocab_size]`, computed in float32.

    Args:
        token_ids: `[num_rows]`, the token each row is asked for.
        num_top_tokens: how many of a row's likeliest tokens to look for, the lower id first among equals.
    """
    logits = logits.float()
    normalizer = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(-1, token_ids[:, None])
    top_ids = _likeliest(logits, num_top_tokens)
    return LogprobTensors(
        token_ids,
        (chosen - normalizer).squeeze(-1),
        (logits > chosen).sum(dim=-1) + 1,
        top_ids,
        logits.gather(-1, top_ids) - normalizer,
    )


def entries(tensors: LogprobTensors, num_top_tokens: Sequence[int]) -> list[TokenLogprob]:
    """One entry per row, with its own number of likeliest tokens. A rank is 1 plus the number of likelier tokens:
    equals share it.
    """
    return [
        TokenLogprob(token_id, logprob, rank, list(zip(ids[:num_top], values[:num_top], strict=True)))
        for token_id, logprob, rank, ids, values, num_top in zip(
            *(tensor.tolist() for tensor in tensors), num_top_tokens, strict=True
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


def add_sampled_logprobs(
    outputs: StepOutputs,
    batch: Sequence[ScheduledRequest],
    sampling: Sequence[int],
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    staging: Staging,
) -> None:
    """To what comes out of a step, the log-probabilities of what it samples, where they are asked for.

    Args:
        sampling: places in `batch`, one for each row of the raw `logits` `[num_rows, vocab_size]` and of `token_ids`.
    """
    wanted = {
        row: num_top
        for row, place in enumerate(sampling)
        if (num_top := batch[place].request.sampling_params.logprobs) is not None
    }
    if not wanted:
        return
    rows, num_top_tokens = list(wanted), list(wanted.values())
    if len(rows) < len(sampling):
        (on_device,) = staging.upload(np.array(rows))
        logits, token_ids = logits.index_select(0, on_device), token_ids.index_select(0, on_device)

    def read(result: StepResult, tensors: Sequence[torch.Tensor]) -> None:
        for row, entry in zip(rows, entries(LogprobTensors(*tensors), num_top_tokens), strict=True):
            result.logprobs[sampling[row]] = entry

    outputs.add(logprob_tensors(logits, token_ids, max(num_top_tokens)), read)


def add_prompt_logprobs(
    outputs: StepOutputs,
    batch: Sequence[ScheduledRequest],
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    staging: Staging,
) -> None:
    """The same of the prompt tokens that this step's tokens predict: an entry for each request that collects them.

    Args:
        logits_of: places in the flattened batch, a tensor on the device → their raw logits `[num_places, vocab_size]`.
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
            predicted = request.token_ids[item.start + 1 : item.end + 1][: request.num_prompt_tokens - item.start - 1]
            places += range(first_place, first_place + len(predicted))
            token_ids += predicted
            num_top_tokens += [request.sampling_params.prompt_logprobs or 0] * len(predicted)
            num_predicted[index] = len(predicted)
        first_place += item.num_tokens
    if not num_predicted:
        return

    tensors: list[torch.Tensor] = []
    parts = [slice(first, first + _ROWS_AT_ONCE) for first in range(0, len(places), _ROWS_AT_ONCE)]
    for part in parts:
        on_device = staging.upload(np.array(places[part]), np.array(token_ids[part]))
        tensors += logprob_tensors(logits_of(on_device[0]), on_device[1], max(num_top_tokens[part]))

    def read(result: StepResult, tensors: Sequence[torch.Tensor]) -> None:
        width = len(LogprobTensors._fields)
        remaining = (
            entry
            for index, part in enumerate(parts)
            for entry in entries(LogprobTensors(*tensors[index * width : (index + 1) * width]), num_top_tokens[part])
        )
        for index, count in num_predicted.items():
            result.prompt_logprobs[index] = list(islice(remaining, count))

    outputs.add(tensors, read)
