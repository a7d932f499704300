"""Log-probabilities of a token of each row, its rank, and the likeliest tokens beside it.

On a CPU `cpu/logprobs.c` computes them, for bfloat16 and float32 logits; everywhere else torch does.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from .dispatch import library_for

# As in cpu/logprobs.h.
_MAX_TOP = 64


class _CLogprobs(ctypes.Structure):
    """`Logprobs` of cpu/logprobs.h."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("vocab_size", ctypes.c_int64),
        ("token_ids", ctypes.c_void_p),
        ("logprobs", ctypes.c_void_p),
        ("ranks", ctypes.c_void_p),
        ("num_top", ctypes.c_int64),
        ("top_ids", ctypes.c_void_p),
        ("top_logprobs", ctypes.c_void_p),
    )


class TokenLogprobs(NamedTuple):
    """Of one token per row, `[num_rows]`, and of the row's likeliest ones, `[num_rows, num_top_tokens]`."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top_tokens: int) -> TokenLogprobs:
    """From `logits` `[num_rows, vocab_size]`, in float32.

    Args:
        token_ids: int64 `[num_rows]`, the token each row is asked for.
        num_top_tokens: how many of a row's likeliest tokens to look for, the lower id first among equals; no more
            than there are.

    A rank is 1 plus the number of likelier tokens: equals share it.
    """
    num_top_tokens = min(num_top_tokens, logits.shape[-1])
    library = library_for(logits)
    if library is None or num_top_tokens > _MAX_TOP:
        return reference(logits, token_ids, num_top_tokens)
    return _compute(library, logits, token_ids, num_top_tokens)


def reference(logits: torch.Tensor, token_ids: torch.Tensor, num_top_tokens: int) -> TokenLogprobs:
    """As `token_logprobs`, in torch."""
    logits = logits.float()
    normalizer = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(-1, token_ids[:, None])
    top_ids = _likeliest(logits, num_top_tokens)
    return TokenLogprobs(
        token_ids,
        (chosen - normalizer).squeeze(-1),
        (logits > chosen).sum(dim=-1) + 1,
        top_ids,
        logits.gather(-1, top_ids) - normalizer,
    )


def _likeliest(logits: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Ids `[num_rows, num_tokens]` of the highest float32 logits, the lower id first among equals, as in an argmax.

    Equals are common in bfloat16, and `topk` promises no order among them: it gets integers without any.
    """
    # −0 and 0 are equals, and their sum is 0.
    bits = (logits + 0.0).contiguous().view(torch.int32)
    # Ordered as the floats are: those of negative floats run backwards.
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return ((ordered << 32) - ids).topk(num_tokens).indices


def _compute(library: ctypes.CDLL, logits: torch.Tensor, token_ids: torch.Tensor, num_top_tokens: int) -> TokenLogprobs:
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    num_rows, vocab_size = logits.shape
    result = TokenLogprobs(
        token_ids.contiguous(),
        torch.empty(num_rows, dtype=torch.float32),
        torch.empty(num_rows, dtype=torch.int64),
        torch.empty(num_rows, num_top_tokens, dtype=torch.int64),
        torch.empty(num_rows, num_top_tokens, dtype=torch.float32),
    )
    given, logprobs, ranks, top_ids, top_logprobs = (tensor.data_ptr() for tensor in result)
    arguments = _CLogprobs(
        logits.data_ptr(),
        logits.stride(0),
        num_rows,
        vocab_size,
        given,
        logprobs,
        ranks,
        num_top_tokens,
        top_ids,
        top_logprobs,
    )
    library.token_logprobs(ctypes.byref(arguments), torch.get_num_threads())
    return result
