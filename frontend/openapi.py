"""The API as an OpenAPI document.

The schemas come from the types that validate requests and make answers, so they cannot disagree with them. Swagger
UI 4 reads OpenAPI 3.0, hence the small translation from JSON Schema 2020-12.
"""

from __future__ import annotations

from typing import Any

import msgspec

from frontend.anthropic.protocol import CountTokensRequest, MessagesRequest
from frontend.anthropic.responses import (
    AnsweredMessage,
    AnthropicErrorBody,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    MessageDelta,
    MessageStart,
    MessageStop,
    TokenCount,
)
from frontend.openai.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from frontend.openai.responses import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    Detokenized,
    ErrorBody,
    ModelCard,
    ModelList,
    Tokenized,
)

from .adapter_routes import LoadLoraAdapterRequest, UnloadLoraAdapterRequest
from .cache_header import CACHE_HEADER
from .cache_routes import ResetAnswer, ResetRequest
from .explain.answers import ExplainAnswer, ProbeAnswer
from .health import Health, Version
from .version import foreword_version

_CHAT_EXAMPLE = {
    "messages": [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "What is the capital of France?"},
    ],
    "max_tokens": 64,
}
_COMPLETION_EXAMPLE = {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}
_MESSAGE_EXAMPLE = {
    "max_tokens": 64,
    "system": [{"type": "text", "text": "You are a helpful assistant.", "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
}
_MESSAGE_EVENTS = [MessageStart, ContentBlockStart, ContentBlockDelta, ContentBlockStop, MessageDelta, MessageStop]


def openapi_document() -> dict[str, Any]:
    """The API as an OpenAPI 3.0 document."""
    types = [
        ChatCompletionRequest,
        ChatCompletion,
        ChatCompletionChunk,
        CompletionRequest,
        Completion,
        TokenizeRequest,
        Tokenized,
        DetokenizeRequest,
        Detokenized,
        MessagesRequest,
        AnsweredMessage,
        *_MESSAGE_EVENTS,
        CountTokensRequest,
        TokenCount,
        AnthropicErrorBody,
        ModelList,
        ModelCard,
        Health,
        Version,
        ResetRequest,
        ResetAnswer,
        LoadLoraAdapterRequest,
        UnloadLoraAdapterRequest,
        ProbeAnswer,
        ExplainAnswer,
        ErrorBody,
    ]
    _, schemas = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    return {
        "openapi": "3.0.3",
        "info": {
            "title": "Foreword",
            "version": foreword_version(),
            "description": "The OpenAI and the Anthropic API, with automatic prefix caching:"
            " `usage.prompt_tokens_details.cached_tokens`, or `usage.cache_read_input_tokens`, says how many tokens of"
            " the prompt did not have to be computed again.",
        },
        "paths": {
            "/v1/chat/completions": {
                "post": _completion(
                    "Continue a chat",
                    "Renders the messages with the model's chat template and generates the assistant's next one.",
                    "ChatCompletionRequest",
                    _CHAT_EXAMPLE,
                    "ChatCompletion",
                    "ChatCompletionChunk",
                )
            },
            "/v1/completions": {
                "post": _completion(
                    "Continue a text",
                    "Generates what follows each prompt, without a chat template.",
                    "CompletionRequest",
                    _COMPLETION_EXAMPLE,
                    "Completion",
                    "Completion",
                )
            },
            "/tokenize": {
                "post": _post(
                    "Tell the tokens of a prompt",
                    "Exactly the tokens the completion endpoints make of the same `prompt` or `messages`. Also works"
                    " while there is no engine, and for prompts that are too long for the model.",
                    "TokenizeRequest",
                    {"prompt": "The capital of France is", "return_token_strs": True},
                    "Tokenized",
                )
            },
            "/detokenize": {
                "post": _post(
                    "Tell the text of tokens",
                    "Special tokens are spelled out.",
                    "DetokenizeRequest",
                    {"tokens": [504, 3575, 282]},
                    "Detokenized",
                )
            },
            **_anthropic_paths(),
            "/v1/cache/probe": {
                "post": _cache_question(
                    "What of a prompt is cached?",
                    "Takes the body of a chat or a completion with one prompt, and runs nothing.",
                    "ProbeAnswer",
                )
            },
            "/v1/cache/explain": {
                "post": _cache_question(
                    "Why is no more of a prompt cached?",
                    "Where the request and its longest cached relative part, which component is responsible, and what"
                    " to change. Only what the request itself could find is looked at. Takes the body of a chat or a"
                    " completion with one prompt, and runs nothing.",
                    "ExplainAnswer",
                )
            },
            "/v1/models": {
                "get": _get("OpenAI API", "List the served names, those of adapters too", {200: "ModelList"})
            },
            "/v1/models/{model_id}": {
                "get": {
                    **_get("OpenAI API", "Describe one served name", {200: "ModelCard", 404: "ErrorBody"}),
                    "parameters": [{"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}],
                }
            },
            "/health": {"get": _get("Server", "Is there an engine to answer?", {200: "Health", 503: "Health"})},
            "/version": {"get": _get("Server", "Foreword's version", {200: "Version"})},
            "/metrics": {
                "get": {
                    "tags": ["Server"],
                    "summary": "What the server counts and measures, for Prometheus",
                    "responses": {"200": _response(200, {"text/plain": {"schema": {"type": "string"}}})},
                }
            },
            "/reset_prefix_cache": {"post": _reset()},
            **_adapter_paths(),
        },
        "components": {
            "schemas": {name: _to_openapi_30(schema) for name, schema in schemas.items()},
            "securitySchemes": {
                "apiKey": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "Needed where the server was started with API keys. `x-api-key: KEY` is as good.",
                }
            },
        },
        "security": [{}, {"apiKey": []}],
    }


def _anthropic_paths() -> dict[str, Any]:
    message = _post(
        "Continue a conversation",
        "As the Anthropic API has it. With `stream`, the answer is a series of server-sent events.",
        "MessagesRequest",
        _MESSAGE_EXAMPLE,
        "AnsweredMessage",
    )
    message["responses"]["200"]["content"]["text/event-stream"] = {
        "schema": {"oneOf": [_ref(each.__name__) for each in _MESSAGE_EVENTS]},
        "example": "event: message_start\ndata: {…}\n\n…\n\nevent: message_stop\ndata: {…}\n\n",
    }
    message["responses"]["200"]["headers"] = _ANSWER_HEADERS
    message["responses"]["503"] = _response(503, _json("ErrorBody"))
    count = _post(
        "Count the tokens of a conversation",
        "As many as `/v1/messages` makes of it. Also works while there is no engine, and for prompts that are"
        " too long for the model.",
        "CountTokensRequest",
        {name: value for name, value in _MESSAGE_EXAMPLE.items() if name != "max_tokens"},
        "TokenCount",
    )
    for operation in (message, count):
        operation["tags"] = ["Anthropic API"]
        for status, response in operation["responses"].items():
            if status != "200":
                response["content"] = _json("AnthropicErrorBody")
    return {"/v1/messages": {"post": message}, "/v1/messages/count_tokens": {"post": count}}


_ANSWER_HEADERS = {
    CACHE_HEADER: {
        "description": "What the prefix cache did for the answer.",
        "schema": {"type": "string"},
        "example": "hit; tokens=1024; prompt=2048; reason=diverged",
    }
}
_RESPONSES = {
    200: "The answer",
    400: "The request is wrong: `param` names the field",
    401: "The server has API keys, and the request has none of them",
    403: "Only an admin key may do that",
    404: "Unknown model, adapter or path",
    413: "The body is too large",
    503: "No engine, or too much to do: try again",
}


def _completion(
    summary: str, description: str, request: str, example: dict[str, Any], answer: str, chunk: str
) -> dict[str, Any]:
    operation = _post(summary, description, request, example, answer)
    operation["description"] += (
        f" With `stream`, the answer is a series of server-sent events, one `{chunk}` each, then `[DONE]`."
    )
    operation["responses"]["200"]["headers"] = _ANSWER_HEADERS
    operation["responses"]["200"]["content"]["text/event-stream"] = {
        "schema": _ref(chunk),
        "example": "data: {…}\n\ndata: {…}\n\ndata: [DONE]\n\n",
    }
    operation["responses"]["503"] = _response(503, _json("ErrorBody"))
    return operation


def _post(summary: str, description: str, request: str, example: dict[str, Any], answer: str) -> dict[str, Any]:
    return {
        "tags": ["OpenAI API"],
        "summary": summary,
        "description": description,
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _ref(request), "example": example}},
        },
        "responses": {
            "200": _response(200, _json(answer)),
            **{str(status): _response(status, _json("ErrorBody")) for status in (400, 401, 404, 413)},
        },
    }


def _cache_question(summary: str, description: str, answer: str) -> dict[str, Any]:
    operation = _post(summary, description, "ChatCompletionRequest", _CHAT_EXAMPLE, answer)
    operation["tags"] = ["Prefix cache"]
    bodies = {"oneOf": [_ref("ChatCompletionRequest"), _ref("CompletionRequest")]}
    operation["requestBody"]["content"]["application/json"]["schema"] = bodies
    operation["responses"]["503"] = _response(503, _json("ErrorBody"))
    return operation


def _reset() -> dict[str, Any]:
    flag: dict[str, Any] = {"type": "boolean", "default": False}
    responses = {str(status): _response(status, _json("ErrorBody")) for status in (400, 401, 403)}
    return {
        "tags": ["Server"],
        "summary": "Forget every cached prefix",
        "description": "After the present step. Requests that run go on with what they have, which nobody finds any"
        " more; with `reset_running_requests` they are preempted first and computed again, which their clients notice"
        " only by the time it takes. 503: some engine has not done it, and may have its cache; the others have, as the"
        " answer says. 403: only who has an admin key may.",
        "parameters": [{"name": "reset_running_requests", "in": "query", "schema": flag}],
        "requestBody": {"required": False, "content": _json("ResetRequest")},
        "responses": {str(status): _response(status, _json("ResetAnswer")) for status in (200, 503)} | responses,
    }


def _adapter_paths() -> dict[str, Any]:
    load = _adapter_change(
        "Load a LoRA adapter",
        "From a directory in PEFT format, below the `--lora-root` of the engine's machine; running requests go on. Then"
        " `model` may be its name. If one of several engines refuses it, none has it.",
        LoadLoraAdapterRequest.__name__,
        {"lora_name": "pirate", "lora_path": "/adapters/pirate"},
    )
    unload = _adapter_change(
        "Unload a LoRA adapter",
        "Requests that ask for it go on to their end.",
        UnloadLoraAdapterRequest.__name__,
        {"lora_name": "pirate"},
    )
    return {"/v1/load_lora_adapter": {"post": load}, "/v1/unload_lora_adapter": {"post": unload}}


def _adapter_change(summary: str, description: str, request: str, example: dict[str, Any]) -> dict[str, Any]:
    operation = _post(summary, f"{description} 403: only who has an admin key may.", request, example, request)
    operation["tags"] = ["Server"]
    operation["responses"]["200"] = _response(200, {"text/plain": {"schema": {"type": "string"}}})
    for status in (403, 404, 503):
        operation["responses"][str(status)] = _response(status, _json("ErrorBody"))
    return operation


def _get(tag: str, summary: str, answers: dict[int, str]) -> dict[str, Any]:
    responses = {str(status): _response(status, _json(name)) for status, name in answers.items()}
    return {"tags": [tag], "summary": summary, "responses": responses}


def _response(status: int, content: dict[str, Any]) -> dict[str, Any]:
    return {"description": _RESPONSES[status], "content": content}


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": _ref(name)}}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _to_openapi_30(schema: Any) -> Any:
    """JSON Schema 2020-12 as msgspec writes it → OpenAPI 3.0: `nullable` instead of a null type, boolean bounds."""
    if isinstance(schema, list):
        return [_to_openapi_30(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: _to_openapi_30(value) for key, value in schema.items()}
    if (alternatives := schema.get("anyOf")) is not None:
        rest = [item for item in alternatives if item != {"nullable": True}]
        if len(rest) < len(alternatives):
            schema["nullable"] = True
        if len(rest) == 1 and "$ref" not in rest[0]:
            del schema["anyOf"]
            schema = {**rest[0], **schema}
        else:
            schema["anyOf"] = rest
    for bound, flag in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if flag in schema:
            schema[bound], schema[flag] = schema[flag], True
    if schema.get("type") == "null":
        schema = {key: value for key, value in schema.items() if key != "type"} | {"nullable": True}
    if schema.get("default", ...) is None:
        del schema["default"]
    return schema
