"""What the Anthropic API answers, as structs whose fields are the JSON's."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from frontend.errors import ApiError
from frontend.request_fields import JsonObject
from frontend.streaming import event

from .usage import DeltaUsage, MessageUsage

StopReason = Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]


class AnsweredText(Struct, tag="text", tag_field="type"):
    text: str


class AnsweredToolUse(Struct, tag="tool_use", tag_field="type"):
    """`input` is as the model spelled it, and has not been checked against the tool's schema."""

    id: str
    name: str
    input: JsonObject


AnsweredBlock = AnsweredText | AnsweredToolUse


class AnsweredMessage(Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnsweredBlock]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(Struct):
    input_tokens: int


class MessageStart(Struct, tag="message_start", tag_field="type"):
    """Once the first token is known."""

    message: AnsweredMessage


class ContentBlockStart(Struct, tag="content_block_start", tag_field="type"):
    index: int
    content_block: AnsweredBlock


class TextDelta(Struct, tag="text_delta", tag_field="type"):
    text: str


class InputJsonDelta(Struct, tag="input_json_delta", tag_field="type"):
    """All of a tool's input: it is not split."""

    partial_json: str


class ContentBlockDelta(Struct, tag="content_block_delta", tag_field="type"):
    index: int
    delta: TextDelta | InputJsonDelta


class ContentBlockStop(Struct, tag="content_block_stop", tag_field="type"):
    index: int


class StopDelta(Struct):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, tag="message_delta", tag_field="type"):
    delta: StopDelta
    usage: DeltaUsage


class MessageStop(Struct, tag="message_stop", tag_field="type"):
    pass


StreamedEvent = MessageStart | ContentBlockStart | ContentBlockDelta | ContentBlockStop | MessageDelta | MessageStop


def encode_event(streamed: StreamedEvent) -> bytes:
    """As a server-sent event, which bears its type's name."""
    tag = streamed.__struct_config__.tag
    assert isinstance(tag, str)
    return event(msgspec.json.encode(streamed), tag.encode())


class AnthropicErrorDetails(Struct):
    """For programs. `param` is the field at fault."""

    error_code: str | UnsetType = UNSET
    param: str | UnsetType = UNSET


class AnthropicError(Struct):
    type: str
    message: str
    details: AnthropicErrorDetails | UnsetType = UNSET


class AnthropicErrorBody(Struct, tag="error", tag_field="type"):
    error: AnthropicError
    request_id: str


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


def encode_error(error: ApiError, request_id: str) -> bytes:
    """The body that tells a client of the Anthropic API about `error`. Its message names the field at fault."""
    kind = _ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    message = error.message
    details: AnthropicErrorDetails | UnsetType = UNSET
    if error.param is not None or error.code is not None:
        details = AnthropicErrorDetails(error.code or UNSET, error.param or UNSET)
    if error.param is not None and error.param not in message:
        message = f"{error.param}: {message}"
    return msgspec.json.encode(AnthropicErrorBody(AnthropicError(kind, message, details), request_id))


EMPTY_OBJECT = Raw(b"{}")
