"""What the engine and the prompt's makers raise → what a client is told, in the names its API has for things."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ipc.vocabulary import RequestError

from .engine_errors import EngineUnavailableError, RequestRefusedError
from .errors import ApiError, internal_error, invalid_request, model_not_found, overloaded, shutting_down, unavailable
from .metrics.families import REJECTION_REASONS
from .output_limits import context_limit
from .prompt.errors import PromptError, PromptTooLongError
from .serving import Serving


def _as_it_is(name: str) -> str:
    return name


@dataclass(frozen=True, slots=True)
class FieldNames:
    """What a request's fields are called by its API, where the engine or the prompt's makers call them otherwise.

    Attributes:
        prompt: that of all that the prompt is made of.
        pictures: tells those of the pictures, in the order of the prompt.
        of_engine: by the name of the field of `EngineRequest` or `SamplingParams`.
        of_chat: a field of a `Chat` (`messages[2].tool_calls`) → its name in the request.
    """

    prompt: str
    pictures: Callable[[], Sequence[str]] = tuple
    of_engine: Mapping[str, str] = field(default_factory=dict)
    of_chat: Callable[[str], str] = _as_it_is


@contextmanager
def client_errors(serving: Serving, names: FieldNames) -> Iterator[None]:
    """Inside, errors of engine and prompt become ApiErrors that name the request's fields."""
    try:
        with prompt_errors(serving, names):
            yield
    except EngineUnavailableError as error:
        raise (shutting_down() if serving.is_shutting_down else unavailable(str(error))) from error
    except RequestRefusedError as error:
        if error.error.reason in REJECTION_REASONS:
            serving.metrics.requests.reject(error.error.reason)
        raise _refused(error.error, names) from error


@contextmanager
def prompt_errors(serving: Serving, names: FieldNames) -> Iterator[None]:
    """Inside, errors of the prompt become ApiErrors that name all of it, or the part at fault."""
    try:
        yield
    except PromptTooLongError as error:
        reason = "" if serving.client.capabilities is None else f": {context_limit(serving.client.capabilities)}"
        raise invalid_request(f"{error}{reason}", names.prompt, "context_length_exceeded") from error
    except PromptError as error:
        if error.field is None:
            raise invalid_request(str(error), names.prompt) from error
        raise _renamed(str(error), error.field, names.of_chat(error.field)) from error


def _refused(error: RequestError, names: FieldNames) -> ApiError:
    if error.reason == "draining":
        return unavailable(error.message)
    if error.code == "overloaded":
        return overloaded(error.message, math.ceil(error.retry_after_s or 1))
    if error.code == "internal":
        return internal_error(error.message)
    if error.param == "adapter":
        # It was unloaded while the request was on its way.
        return model_not_found(f"model: {error.message.removeprefix('adapter: ')}")
    pictures = {f"mm_features[{k}]": name for k, name in enumerate(names.pictures())}
    if error.param in pictures:
        return _renamed(error.message, error.param, pictures[error.param])
    of_engine = {"prompt_token_ids": names.prompt, "mm_features": names.prompt, **names.of_engine}
    return invalid_request(error.message, of_engine.get(error.param or "", error.param))


def _renamed(message: str, name: str, new_name: str) -> ApiError:
    """400 about the field `new_name`, which `message` may call `name` where it begins."""
    if message.startswith(name):
        message = new_name + message.removeprefix(name)
    return invalid_request(message, new_name)
