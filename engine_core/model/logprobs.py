"""Log-probabilities of tokens, sampled or given, from the raw logits: before any rule, temperature or truncation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np
import torch

from engine_core.runner import ScheduledRequest, StepResult
from ipc.vocabulary import TokenLogprob
from kernels.token_logprobs import TokenLogprobs, token_logprobs

from .input_batch import Places
from .staging import Staging
from .step_outputs import StepOutputs

# Prompt tokens whose logits exist at once: about what a decode step of many requests has.
_ROWS_AT_ONCE = 64


def entries(tensors: TokenLogprobs, num_top_tokens: Sequence[int]) -> list[TokenLogprob]:
    """One entry per row, with its own number of likeliest tokens. A rank is 1 plus the number of likelier tokens:
    equals share it.
    """
    return [
        TokenLogprob(token_id, logprob, rank, list(zip(ids[:num_top], values[:num_top], strict=True)))
        for token_id, logprob, rank, ids, values, num_top in zip(
            *(tensor.tolist() for tensor in tensors), num_top_tokens, strict=True
        )
    ]


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
        for row, entry in zip(rows, entries(TokenLogprobs(*tensors), num_top_tokens), strict=True):
            result.logprobs[sampling[row]] = entry

    outputs.add(token_logprobs(logits, token_ids, max(num_top_tokens)), read)


def add_prompt_logprobs(
    outputs: StepOutputs,
    batch: Sequence[ScheduledRequest],
    logits_of: Callable[[Places], torch.Tensor],
    staging: Staging,
) -> None:
    """The same of the prompt tokens that this step's tokens predict: an entry for each request that collects them.

    Args:
        logits_of: places in the flattened batch → their raw logits `[num_places, vocab_size]`.
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
        on_host = np.array(places[part])
        places_on_device, ids_on_device = staging.upload(on_host, np.array(token_ids[part]))
        logits = logits_of(Places(on_host, places_on_device))
        tensors += token_logprobs(logits, ids_on_device, max(num_top_tokens[part]))

    def read(result: StepResult, tensors: Sequence[torch.Tensor]) -> None:
        width = len(TokenLogprobs._fields)
        remaining = (
            entry
            for index, part in enumerate(parts)
            for entry in entries(TokenLogprobs(*tensors[index * width : (index + 1) * width]), num_top_tokens[part])
        )
        for index, count in num_predicted.items():
            result.prompt_logprobs[index] = list(islice(remaining, count))

    outputs.add(tensors, read)
