"""What a request says about its output: which settings go together, and what the engine is told of them."""

from __future__ import annotations

import asyncio

from frontend.errors import invalid_request
from frontend.output_limits import check_max_tokens, check_stop_strings
from frontend.prompt.tokenizer import ModelTokenizer
from ipc.vocabulary import EngineCapabilities, SamplingParams

from .bad_words import bad_words_token_ids
from .protocol import ChatCompletionRequest, CompletionRequest

DEFAULT_COMPLETION_TOKENS = 16


def check_combinations(request: ChatCompletionRequest | CompletionRequest) -> None:
    """Raises ApiError (400) where one field makes no sense beside another."""
    if request.stream_options is not None and not request.stream:
        raise invalid_request("stream_options is only allowed when stream is true", "stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise invalid_request("prompt_logprobs is not available with stream", "prompt_logprobs")
    if isinstance(request, ChatCompletionRequest):
        if request.top_logprobs and not request.logprobs:
            raise invalid_request("top_logprobs needs logprobs to be true", "top_logprobs")
    elif request.best_of not in (None, request.n or 1):
        raise invalid_request(
            f"best_of is {request.best_of} and n is {request.n or 1}: choosing the best of several is not supported;"
            " leave best_of out",
            "best_of",
            "unsupported_parameter",
        )


def num_logprobs(request: ChatCompletionRequest | CompletionRequest) -> int | None:
    """How many likeliest tokens to list in each place of the output; None for no log-probabilities at all."""
    if isinstance(request, CompletionRequest):
        return request.logprobs
    return request.top_logprobs or 0 if request.logprobs else None


async def sampling_params(
    request: ChatCompletionRequest | CompletionRequest, capabilities: EngineCapabilities, tokenizer: ModelTokenizer
) -> SamplingParams:
    """Raises ApiError (400)."""
    field, max_tokens = request.max_tokens_field()
    echo = isinstance(request, CompletionRequest) and bool(request.echo)
    if max_tokens is not None:
        check_max_tokens(max_tokens, field, capabilities, least=0 if echo else 1)
    if max_tokens is None and isinstance(request, CompletionRequest):
        max_tokens = DEFAULT_COMPLETION_TOKENS
    min_tokens = request.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise invalid_request(f"min_tokens is {min_tokens}, more than {field}, which is {max_tokens}", "min_tokens")
    bad_words: tuple[tuple[int, ...], ...] = ()
    if request.bad_words:
        bad_words = await asyncio.to_thread(bad_words_token_ids, request.bad_words, tokenizer)
    logprobs = num_logprobs(request)
    of_prompt = (request.prompt_logprobs, logprobs if echo else None)
    wanted = [num for num in of_prompt if num is not None]
    stop_token_ids = tuple(request.stop_token_ids or ())
    check_vocabulary(stop_token_ids, capabilities.vocab_size, "stop_token_ids")
    return SamplingParams(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_k=max(request.top_k or 0, 0),
        top_p=1.0 if request.top_p is None else request.top_p,
        seed=request.seed,
        max_tokens=None if max_tokens is None else max(max_tokens, 1),
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(request.ignore_eos),
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        logit_bias=request.logit_bias or {},
        allowed_token_ids=None if request.allowed_token_ids is None else tuple(request.allowed_token_ids),
        bad_words_token_ids=bad_words,
        min_tokens=min_tokens,
        n=request.n or 1,
        logprobs=None if max_tokens == 0 else logprobs,
        prompt_logprobs=max(wanted) if wanted else None,
    )


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """Raises ApiError (400) for too many, and for empty ones."""
    return check_stop_strings([stop] if isinstance(stop, str) else stop or (), "stop")


def check_vocabulary(token_ids: list[int] | tuple[int, ...], vocab_size: int, param: str) -> None:
    """Raises ApiError (400) naming `param` if one of `token_ids` is outside the vocabulary."""
    if token_ids and max(token_ids) >= vocab_size:
        raise invalid_request(
            f"{param} holds token id {max(token_ids)}; this model's vocabulary has {vocab_size} tokens"
            f" (ids 0 to {vocab_size - 1})",
            param,
        )
