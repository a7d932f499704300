"""Fields of the API that are known and not done yet: refused where they would change the answer."""

from __future__ import annotations

from typing import Any

from frontend.errors import not_supported

from .protocol import ChatCompletionRequest, CompletionRequest, Message, Tool

# field → values that change nothing, besides null
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
}
_NEUTRAL_CHAT: dict[str, tuple[Any, ...]] = {
    **_NEUTRAL,
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_NEUTRAL_COMPLETION: dict[str, tuple[Any, ...]] = {
    **_NEUTRAL,
    "suffix": ("",),
}


def refuse_unsupported(request: ChatCompletionRequest | CompletionRequest) -> None:
    """Raises ApiError (400) naming the first field whose value asks for something that is not done yet."""
    is_chat = isinstance(request, ChatCompletionRequest)
    for field, neutral in (_NEUTRAL_CHAT if is_chat else _NEUTRAL_COMPLETION).items():
        value = getattr(request, field)
        if value is not None and value not in neutral:
            raise not_supported(field, f"{field} = {value!r}" if isinstance(value, str | int | float) else field)
    if isinstance(request, ChatCompletionRequest):
        _refuse_in_chat(request)


def _refuse_in_chat(request: ChatCompletionRequest) -> None:
    if request.response_format is not None and request.response_format.type != "text":
        raise not_supported("response_format", f"response_format of type {request.response_format.type!r}")
    refuse_unsupported_in_prompt(request.messages, request.tools)


def refuse_unsupported_in_prompt(messages: list[Message], tools: list[Tool] | None) -> None:
    """Raises ApiError (400) naming the first field of messages or tools that asks for something not done yet."""
    for i, tool in enumerate(tools or ()):
        if tool.function.strict:
            raise not_supported(f"tools[{i}].function.strict", "strict = True")
    for i, message in enumerate(messages):
        if message.role == "function":
            raise not_supported(f"messages[{i}].role", "the role 'function'")
        for field in ("audio", "function_call"):
            if getattr(message, field):
                raise not_supported(f"messages[{i}].{field}", f"{field} in a message")
