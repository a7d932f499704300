"""What the OpenAI API answers, as structs whose fields are the JSON's."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from frontend.choice import FinishReason
from frontend.errors import ApiError
from frontend.prepared import TokenCounts
from ipc.vocabulary import MissReason


class PromptTokensDetails(Struct):
    """`image_tokens`: of the prompt's tokens, those that stand for its pictures, cached or not.

    `cache_miss_reason`: why no more of it was cached (`ipc.vocabulary.MissReason`); null if nothing was missing.
    `kept_tokens`: where some of it was to be kept cached, how much is.
    """

    cached_tokens: int
    image_tokens: int
    cache_miss_reason: MissReason | UnsetType | None = UNSET
    kept_tokens: int | UnsetType = UNSET


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_of(counts: TokenCounts) -> Usage:
    details = PromptTokensDetails(counts.cached_tokens, counts.image_tokens)
    if (reason := counts.miss_reason) is not None:
        details.cache_miss_reason = None if reason == "none" else reason
    if (kept := counts.kept_tokens) is not None:
        details.kept_tokens = kept.kept
    return Usage(
        prompt_tokens=counts.prompt_tokens,
        completion_tokens=counts.completion_tokens,
        total_tokens=counts.prompt_tokens + counts.completion_tokens,
        prompt_tokens_details=details,
    )


class PromptLogprob(Struct):
    """Of one token in one place of the prompt. `rank` 1 is the most likely."""

    logprob: float
    rank: int
    decoded_token: str


# Per token of the prompt: token id → its log-probability there; null for the first, which nothing predicts.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


class ChatTopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct):
    """Four lists of the same length; `text_offset` is in characters of the choice's text."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class FunctionCall(Struct):
    """`arguments` is a JSON object as the model spelled it, in a string."""

    name: str
    arguments: str


class ToolCall(Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(Struct):
    """`content` is null where there is nothing but calls."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    message: AssistantMessage
    finish_reason: FinishReason
    index: int
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | None = None


class ChatCompletion(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ToolCallDelta(ToolCall, kw_only=True):
    """A whole call: its arguments are not split. `index` counts the calls of a choice."""

    index: int


class ChatDelta(Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    delta: ChatDelta
    index: int
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType | None = UNSET


class ChatCompletionChunk(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET


class CompletionChoice(Struct):
    index: int
    text: str
    finish_reason: FinishReason | None
    logprobs: CompletionLogprobs | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct):
    """Also a chunk of a streamed completion: the API has one shape for both."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: Usage | UnsetType | None = UNSET


class ModelCard(Struct):
    """A LoRA adapter has the model it changes as `parent` and the directory it was read from as `root`."""

    id: str
    created: int
    max_model_len: int | None
    object: Literal["model"] = "model"
    owned_by: str = "foreword"
    root: str | UnsetType = UNSET
    parent: str | UnsetType = UNSET


class ModelList(Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class Tokenized(Struct):
    """`max_model_len` is null until an engine has answered for the first time."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Struct):
    prompt: str


class ErrorDetails(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct):
    error: ErrorDetails


def error_details(error: ApiError) -> ErrorDetails:
    """What a client of the OpenAI API is told about `error`."""
    return ErrorDetails(error.message, error.kind, error.param, error.code)


def encode_error(error: ApiError) -> bytes:
    """The body that tells a client of the OpenAI API about `error`."""
    return msgspec.json.encode(ErrorBody(error_details(error)))
