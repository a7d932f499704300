"""What the engine and the prompt's makers raise → what a client of the OpenAI API is told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from frontend.engine_client import EngineUnavailableError, RequestRefusedError
from frontend.errors import ApiError, internal_error, invalid_request, overloaded, unavailable
from frontend.prompt.errors import PromptError, PromptTooLongError
from ipc.messages import RequestError

from .protocol import ChatCompletionRequest, CompletionRequest


@contextmanager
def client_errors(request: ChatCompletionRequest | CompletionRequest) -> Iterator[None]:
    """Inside, errors of engine and prompt become ApiErrors that name the fields of `request`."""
    prompt_field = "messages" if isinstance(request, ChatCompletionRequest) else "prompt"
    try:
        yield
    except PromptTooLongError as error:
        raise invalid_request(str(error), prompt_field, "context_length_exceeded") from error
    except PromptError as error:
        raise invalid_request(str(error), prompt_field) from error
    except EngineUnavailableError as error:
        raise unavailable(str(error)) from error
    except RequestRefusedError as error:
        raise _refused(error.error, request, prompt_field) from error


def _refused(error: RequestError, request: ChatCompletionRequest | CompletionRequest, prompt_field: str) -> ApiError:
    if error.code == "overloaded":
        return overloaded(error.message)
    if error.code == "internal":
        return internal_error(error.message)
    fields = {"prompt_token_ids": prompt_field, "max_tokens": request.max_tokens_field()[0]}
    return invalid_request(error.message, fields.get(error.param or "", error.param))
