"""What the engine and the prompt's makers raise → errors that name the fields of the OpenAI API."""

from __future__ import annotations

from frontend.refusals import FieldNames

from .protocol import ChatCompletionRequest, CompletionRequest, ImageUrlPart


def field_names(request: ChatCompletionRequest | CompletionRequest) -> FieldNames:
    """What this API calls what errors are about."""
    is_chat = isinstance(request, ChatCompletionRequest)
    return FieldNames(
        prompt="messages" if is_chat else "prompt",
        pictures=lambda: _picture_fields(request),
        of_engine={
            "max_tokens": request.max_tokens_field()[0],
            "bad_words_token_ids": "bad_words",
            # `echo` asks for those of the prompt, too.
            "prompt_logprobs": "logprobs" if request.prompt_logprobs is None else "prompt_logprobs",
        },
    )


def _picture_fields(request: ChatCompletionRequest | CompletionRequest) -> list[str]:
    if not isinstance(request, ChatCompletionRequest):
        return []
    return [
        f"messages[{i}].content[{j}]"
        for i, message in enumerate(request.messages)
        if isinstance(message.content, list)
        for j, part in enumerate(message.content)
        if isinstance(part, ImageUrlPart)
    ]
