"""Messages and tools of the OpenAI API → a chat for the model's template. What is wrong with them is found here."""

from __future__ import annotations

from msgspec import UNSET, Raw, UnsetType

from frontend.errors import invalid_request
from frontend.prompt.canonical_json import JsonText
from frontend.prompt.chat import Chat, ChatMessage, Tool, ToolCall

from .protocol import ChatCompletionRequest, Message, TextPart, TokenizeRequest, ToolCallField
from .protocol import Tool as ToolField


def chat_of(messages: list[Message], request: ChatCompletionRequest | TokenizeRequest) -> Chat:
    """Raises ApiError (400) naming the field at fault. JSON in the fields is checked when it is rendered."""
    if not messages:
        raise invalid_request("messages must not be empty", "messages")
    goes_on = bool(request.continue_final_message)
    if goes_on and request.add_generation_prompt:
        raise invalid_request(
            "continue_final_message and add_generation_prompt exclude each other: the last message is either to be"
            " continued, or answered",
            "continue_final_message",
        )
    return Chat(
        messages=[_message(message, i) for i, message in enumerate(messages)],
        tools=[_tool(tool, i) for i, tool in enumerate(request.tools or ())],
        add_generation_prompt=not goes_on if request.add_generation_prompt is None else request.add_generation_prompt,
        continue_final_message=goes_on,
        variables=_json(request.chat_template_kwargs, "chat_template_kwargs"),
    )


def _message(message: Message, i: int) -> ChatMessage:
    # Models were trained with a system role; the API's newer name for it is the same thing.
    role = "system" if message.role == "developer" else message.role
    if message.tool_calls and role != "assistant":
        raise invalid_request(f"only assistants have tool_calls, not the role '{role}'", f"messages[{i}].tool_calls")
    if (role == "tool") != bool(message.tool_call_id):
        reason = "is required" if role == "tool" else "is only allowed"
        raise invalid_request(f"tool_call_id {reason} in messages of the role 'tool'", f"messages[{i}].tool_call_id")
    return ChatMessage(
        role,
        _content(message, f"messages[{i}].content"),
        message.name,
        [_tool_call(call, f"messages[{i}].tool_calls[{j}]") for j, call in enumerate(message.tool_calls or ())],
        message.tool_call_id or None,
    )


def _content(message: Message, path: str) -> str | list[str]:
    if message.content is None:
        if message.role != "assistant":
            raise invalid_request(f"{path} must not be null", path)
        return ""
    if isinstance(message.content, str):
        return message.content
    texts: list[str] = []
    for j, part in enumerate(message.content):
        if not isinstance(part, TextPart):
            kind = part.__struct_config__.tag
            raise invalid_request(
                f"content of type '{kind}' is not supported by this model", f"{path}[{j}]", "unsupported_content"
            )
        texts.append(part.text)
    return texts


def _tool_call(call: ToolCallField, path: str) -> ToolCall:
    # Clients write nothing where there are no arguments.
    arguments = JsonText(call.function.arguments or "{}", f"{path}.function.arguments")
    return ToolCall(call.id, call.function.name, arguments)


def _tool(tool: ToolField, i: int) -> Tool:
    function = tool.function
    return Tool(function.name, function.description, _json(function.parameters, f"tools[{i}].function.parameters"))


def _json(value: Raw | UnsetType, field: str) -> JsonText | None:
    if value is UNSET or bytes(value) == b"null":
        return None
    return JsonText(bytes(value), field)
