"""What the engine and the prompt's makers raise → what a client of the OpenAI API is told."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from frontend.engine_errors import EngineUnavailableError, RequestRefusedError
from frontend.errors import ApiError, internal_error, invalid_request, overloaded, shutting_down, unavailable
from frontend.metrics.families import REJECTION_REASONS
from frontend.prompt.errors import PromptError, PromptTooLongError
from frontend.serving import Serving
from ipc.messages import EngineCapabilities, RequestError

from .protocol import ChatCompletionRequest, CompletionRequest, ImageUrlPart


@contextmanager
def client_errors(serving: Serving, request: ChatCompletionRequest | CompletionRequest) -> Iterator[None]:
    """Inside, errors of engine and prompt become ApiErrors that name the fields of `request`."""
    prompt_field = "messages" if isinstance(request, ChatCompletionRequest) else "prompt"
    try:
        with prompt_errors(serving, prompt_field):
            yield
    except EngineUnavailableError as error:
        raise (shutting_down() if serving.is_shutting_down else unavailable(str(error))) from error
    except RequestRefusedError as error:
        if error.error.reason in REJECTION_REASONS:
            serving.metrics.requests.reject(error.error.reason)
        raise _refused(error.error, request, prompt_field) from error


@contextmanager
def prompt_errors(serving: Serving, prompt_field: str) -> Iterator[None]:
    """Inside, errors of the prompt become ApiErrors that name `prompt_field`, or the part of the chat at fault."""
    try:
        yield
    except PromptTooLongError as error:
        reason = "" if serving.client.capabilities is None else f": {context_limit(serving.client.capabilities)}"
        raise invalid_request(f"{error}{reason}", prompt_field, "context_length_exceeded") from error
    except PromptError as error:
        raise invalid_request(str(error), error.field or prompt_field) from error


def context_limit(capabilities: EngineCapabilities) -> str:
    """What bounds the tokens of a request, with the true numbers."""
    limit, num_blocks, block_size = capabilities.max_model_len, capabilities.num_blocks, capabilities.block_size
    if capabilities.is_limited_by_pool:
        holder = f"this server's KV cache holds {limit} tokens ({num_blocks} blocks of {block_size})"
    else:
        holder = f"the context holds {limit} tokens (max_model_len)"
    return f"{holder}, prompt and output together"


def _refused(error: RequestError, request: ChatCompletionRequest | CompletionRequest, prompt_field: str) -> ApiError:
    if error.reason == "draining":
        return unavailable(error.message)
    if error.code == "overloaded":
        return overloaded(error.message, math.ceil(error.retry_after_s or 1))
    if error.code == "internal":
        return internal_error(error.message)
    pictures = {f"mm_features[{k}]": field for k, field in enumerate(_picture_fields(request))}
    if error.param in pictures:
        field = pictures[error.param]
        return invalid_request(f"{field}{error.message.removeprefix(error.param)}", field)
    fields = {
        "prompt_token_ids": prompt_field,
        "mm_features": prompt_field,
        "max_tokens": request.max_tokens_field()[0],
        "bad_words_token_ids": "bad_words",
        # `echo` asks for those of the prompt, too.
        "prompt_logprobs": "logprobs" if request.prompt_logprobs is None else "prompt_logprobs",
    }
    return invalid_request(error.message, fields.get(error.param or "", error.param))


def _picture_fields(request: ChatCompletionRequest | CompletionRequest) -> list[str]:
    """Of the pictures in the order of the prompt, which is theirs in the request."""
    if not isinstance(request, ChatCompletionRequest):
        return []
    return [
        f"messages[{i}].content[{j}]"
        for i, message in enumerate(request.messages)
        if isinstance(message.content, list)
        for j, part in enumerate(message.content)
        if isinstance(part, ImageUrlPart)
    ]
