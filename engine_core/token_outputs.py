"""What is told of a request's new token, and whether it is its last one."""

from __future__ import annotations

from collections.abc import Container

from ipc.vocabulary import CacheReport, FinishReason, RequestOutput, TokenLogprob

from .request import Request


def finish_reason(
    request: Request, token_id: int, eos_token_ids: Container[int], max_model_len: int
) -> tuple[FinishReason | None, int | None]:
    """Why `request` ends with `token_id`, which it has already; and which of its stop tokens that is, if it is one."""
    params = request.sampling_params
    if request.num_output_tokens >= params.min_tokens:
        if token_id in eos_token_ids and not params.ignore_eos:
            return "stop", None
        if token_id in params.stop_token_ids:
            return "stop", token_id
    is_full = request.num_output_tokens >= request.max_tokens or request.num_tokens >= max_model_len
    return ("length" if is_full else None), None


def ends_with_next_token(request: Request, max_model_len: int) -> bool:
    """Whether the length of `request` alone will end it then."""
    return request.num_output_tokens + 1 >= request.max_tokens or request.num_tokens + 1 >= max_model_len


def token_output(
    request: Request,
    token_id: int,
    ending: tuple[FinishReason | None, int | None],
    logprobs: TokenLogprob | None,
    now_s: float,
    *,
    is_first: bool,
) -> RequestOutput:
    """Of a token of `request`, the first of all its continuations or not; what it has to tell once is told with it.

    `ending` is what `finish_reason` says. How many continuations are unfinished is the caller's to add.
    """
    output = RequestOutput(request.output_id, [token_id], request.num_cached_tokens or 0, *ending, index=request.index)
    if logprobs is not None:
        output.logprobs = [logprobs]
    output.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
    if is_first or output.finish_reason is not None:
        output.timing = request.timing(now_s)
    if is_first and request.miss_reason is not None:
        output.cache = CacheReport(request.miss_reason, request.num_kept_tokens)
    return output
