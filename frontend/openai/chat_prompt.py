"""Messages and tools of the OpenAI API → a chat for the model's template. What is wrong with them is found here."""

from __future__ import annotations

from msgspec import UNSET, Raw, UnsetType

from frontend.errors import invalid_request
from frontend.prompt.canonical_json import JsonText
from frontend.prompt.chat import Chat, ChatMessage, ChatPicture, Tool, ToolCall

from .protocol import ChatCompletionRequest, ImageUrl, ImageUrlPart, Message, TextPart, TokenizeRequest, ToolCallField
from .protocol import Tool as ToolField

MAX_UUID_CHARACTERS = 256


def chat_of(messages: list[Message], request: ChatCompletionRequest | TokenizeRequest, *, takes_pictures: bool) -> Chat:
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
    picture_settings = _json(request.mm_processor_kwargs, "mm_processor_kwargs")
    if picture_settings is not None and not takes_pictures:
        raise invalid_request(
            "mm_processor_kwargs are for pictures; this model takes no pictures", "mm_processor_kwargs"
        )
    return Chat(
        messages=[_message(message, i, takes_pictures) for i, message in enumerate(messages)],
        tools=[_tool(tool, i) for i, tool in enumerate(request.tools or ())],
        add_generation_prompt=not goes_on if request.add_generation_prompt is None else request.add_generation_prompt,
        continue_final_message=goes_on,
        variables=_json(request.chat_template_kwargs, "chat_template_kwargs"),
        picture_settings=picture_settings,
    )


def _message(message: Message, i: int, takes_pictures: bool) -> ChatMessage:
    # Models were trained with a system role; the API's newer name for it is the same thing.
    role = "system" if message.role == "developer" else message.role
    if message.tool_calls and role != "assistant":
        raise invalid_request(f"only assistants have tool_calls, not the role '{role}'", f"messages[{i}].tool_calls")
    if (role == "tool") != bool(message.tool_call_id):
        reason = "is required" if role == "tool" else "is only allowed"
        raise invalid_request(f"tool_call_id {reason} in messages of the role 'tool'", f"messages[{i}].tool_call_id")
    return ChatMessage(
        role,
        _content(message, f"messages[{i}].content", takes_pictures),
        message.name,
        [_tool_call(call, f"messages[{i}].tool_calls[{j}]") for j, call in enumerate(message.tool_calls or ())],
        message.tool_call_id or None,
    )


def _content(message: Message, path: str, takes_pictures: bool) -> str | list[str | ChatPicture]:
    if message.content is None:
        if message.role != "assistant":
            raise invalid_request(f"{path} must not be null", path)
        return ""
    if isinstance(message.content, str):
        return message.content
    parts: list[str | ChatPicture] = []
    for j, part in enumerate(message.content):
        if isinstance(part, TextPart):
            parts.append(part.text)
        elif isinstance(part, ImageUrlPart) and takes_pictures:
            parts.append(_picture(part, f"{path}[{j}]"))
        else:
            kind = part.__struct_config__.tag
            raise invalid_request(
                f"content of type '{kind}' is not supported by this model", f"{path}[{j}]", "unsupported_content"
            )
    return parts


def _picture(part: ImageUrlPart, path: str) -> ChatPicture:
    image = ImageUrl(part.image_url) if isinstance(part.image_url, str) else part.image_url
    if image is None and not part.uuid:
        raise invalid_request(
            f"{path}.image_url must not be null without the uuid of a picture that came before", f"{path}.image_url"
        )
    if part.uuid is not None and not 1 <= len(part.uuid) <= MAX_UUID_CHARACTERS:
        raise invalid_request(
            f"{path}.uuid has {len(part.uuid)} characters; 1 to {MAX_UUID_CHARACTERS} are allowed", f"{path}.uuid"
        )
    if image is None:
        return ChatPicture(None, path, uuid=part.uuid)
    return ChatPicture(image.url, path, image.detail or "auto", part.uuid)


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
