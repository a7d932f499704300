"""Messages, system prompt and tools of the Anthropic API → a chat for the model's template, and what of it to keep.

Each result of a tool becomes a message of its own, and turns of one role that follow each other become one, so the
messages of the chat are not those of the request. What the chat says of its fields is in its own names; `field_names`
knows what the request calls them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from frontend.errors import ApiError, invalid_request
from frontend.isolation import SALT_FROM
from frontend.prompt.breakpoints import Breakpoint
from frontend.prompt.cache_options import CacheControl
from frontend.prompt.canonical_json import JsonText
from frontend.prompt.chat import Chat, ChatMessage, ChatPicture, Tool, ToolCall
from frontend.prompt.errors import PromptError
from frontend.prompt.places import MessagePlace, Place, ToolPlace
from frontend.refusals import FieldNames

from .field_names import MessageNames, request_name
from .protocol import (
    ContentBlock,
    ImageBlock,
    InputMessage,
    PromptFields,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolDefinition,
    ToolResultBlock,
    ToolUseBlock,
    UrlSource,
)

_ALLOWED = {
    "user": (TextBlock, ImageBlock, ToolResultBlock),
    "assistant": (TextBlock, ToolUseBlock, ThinkingBlock, RedactedThinkingBlock),
    "system": (TextBlock,),
}
# No chat template has a place for it.
_ERROR = "Error:"


@dataclass(frozen=True, slots=True)
class AskedChat:
    """What a request's prompt is to be made of. `names` are those of its fields, `places` those of its parts."""

    chat: Chat
    breakpoints: Sequence[Breakpoint]
    names: FieldNames
    places: Mapping[str, Place]

    def place_named(self, name: str) -> Place:
        """Raises PromptError naming `cache_salt.from`: the request has no such part."""
        if (place := self.places.get(name)) is not None:
            return place
        raise PromptError(
            f"{SALT_FROM} is {name[:100]!r}, which names no part of this request; parts are spelled as in"
            f" {', '.join(map(repr, list(self.places)[:4]))}, and counted from 0",
            SALT_FROM,
        )


def asked_chat(request: PromptFields, *, takes_pictures: bool) -> AskedChat:
    """Raises ApiError (400) naming the field at fault. JSON in the fields is checked when it is rendered."""
    if not request.messages:
        raise invalid_request("messages must not be empty", "messages")
    writer = _ChatWriter(takes_pictures)
    tools = [writer.tool(tool, i) for i, tool in enumerate(request.tools or ())]
    if request.system:
        writer.system(request.system)
    for i, message in enumerate(request.messages):
        writer.message(message, f"messages[{i}]")
    messages = writer.finish()
    goes_on = messages[-1].role == "assistant"
    if goes_on and messages[-1].tool_calls:
        field = writer.names[-1].calls[0]
        raise invalid_request(f"{field} calls a tool; a message with its result must follow", field)
    if request.cache_control is not None:
        writer.keep_all(request.cache_control)
    chat = Chat(messages, tools, add_generation_prompt=not goes_on, continue_final_message=goes_on)
    names = FieldNames(
        prompt="messages",
        pictures=lambda: [request_name(picture.field, writer.names) for picture in chat.pictures],
        of_chat=lambda field: request_name(field, writer.names),
    )
    return AskedChat(chat, writer.breakpoints, names, writer.places)


class _ChatWriter:
    """Writes a chat's messages, block by block.

    Attributes:
        breakpoints: in the order tools, system prompt, messages.
        places: of tools, system prompt, messages and their blocks, by what the request calls them.
        names: of each message that is finished, and last of the one that is not.
    """

    def __init__(self, takes_pictures: bool) -> None:
        self.breakpoints: list[Breakpoint] = []
        self.names: list[MessageNames] = []
        self.places: dict[str, Place] = {}
        self._takes_pictures = takes_pictures
        self._messages: list[ChatMessage] = []
        # Where the last block is, and a message's first one, of those that may have a breakpoint.
        self._last_place: Place | None = None
        self._first_place: MessagePlace | None = None
        # The turn that is not finished.
        self._role = ""
        self._parts: list[str | ChatPicture] = []
        self._calls: list[ToolCall] = []

    def tool(self, tool: ToolDefinition, i: int) -> Tool:
        schema = JsonText(bytes(tool.input_schema), f"tools[{i}].function.parameters")
        self._add_place(ToolPlace(i), tool.cache_control, f"tools[{i}]")
        return Tool(tool.name, tool.description, schema)

    def system(self, system: str | list[TextBlock]) -> None:
        self._write(system, "system", MessageNames("system", "system"))
        self.places["system"] = MessagePlace(0)

    def message(self, message: InputMessage, path: str) -> None:
        self._first_place = None
        self._write(message.content, message.role, MessageNames(path, f"{path}.content"))
        first = self._first_place or MessagePlace(len(self._messages))
        # What begins a turn begins with its header.
        self.places[path] = MessagePlace(first.message) if first.part == 0 else first

    def finish(self) -> list[ChatMessage]:
        self._end_turn()
        return self._messages

    def keep_all(self, control: CacheControl) -> None:
        """A breakpoint at the last block. Raises ApiError (400) if there is none, or it has another one."""
        if self._last_place is None:
            raise invalid_request("cache_control keeps nothing: there is no block that could have one", "cache_control")
        same = next((point for point in self.breakpoints if point.place == self._last_place), None)
        if same is None:
            self.breakpoints.append(Breakpoint(self._last_place, control, "cache_control"))
        elif same.control.ttl_s != control.ttl_s:
            raise invalid_request(
                f"cache_control has another ttl than {same.field}, which is at the same place", "cache_control"
            )

    def _begin(self, role: str, names: MessageNames) -> None:
        """Begin a turn, unless one of `role` has begun."""
        if role != self._role:
            self._end_turn()
            self._role = role
            self.names.append(names)

    def _end_turn(self) -> None:
        if self._role:
            content = _simplest(self._parts)
            self._messages.append(ChatMessage(self._role, content, tool_calls=self._calls))
        self._role, self._parts, self._calls = "", [], []

    def _write(self, content: str | Sequence[ContentBlock], role: str, names: MessageNames) -> None:
        if not content or isinstance(content, str):
            self._begin(role, names)
        if isinstance(content, str):
            self._add_part(content, names.content)
            return
        for j, block in enumerate(content):
            field = f"{names.content}[{j}]"
            if not isinstance(block, _ALLOWED[role]):
                raise _not_here(block, role, field)
            if isinstance(block, ToolResultBlock):
                self._result(block, field)
                continue
            self._begin(role, MessageNames(names.message, names.content))
            if isinstance(block, TextBlock):
                self._add_part(block.text, field, block.cache_control)
            elif isinstance(block, ImageBlock):
                self._add_picture(block, field)
            elif isinstance(block, ToolUseBlock):
                self._call(block, field)

    def _add_part(self, part: str | ChatPicture, field: str, control: CacheControl | None = None) -> None:
        self._parts.append(part)
        self.names[-1].parts.append(field)
        self._add_place(MessagePlace(len(self._messages), len(self._parts) - 1), control, field)

    def _call(self, block: ToolUseBlock, field: str) -> None:
        name = f"messages[{len(self._messages)}].tool_calls[{len(self._calls)}].function.arguments"
        self._calls.append(ToolCall(block.id, block.name, JsonText(bytes(block.input), name)))
        self.names[-1].calls.append(field)
        self._add_place(MessagePlace(len(self._messages)), block.cache_control, field)

    def _result(self, block: ToolResultBlock, field: str) -> None:
        path = f"{field}.content"
        self._end_turn()
        self._begin("tool", MessageNames(field, path))
        if isinstance(block.content, str):
            self._add_part(f"{_ERROR} {block.content}" if block.is_error else block.content, path)
        else:
            if block.is_error:
                self._add_part(_ERROR, path)
            for k, part in enumerate(block.content or ()):
                inner = f"{path}[{k}]"
                if isinstance(part, TextBlock):
                    self._add_part(part.text, inner, part.cache_control)
                elif isinstance(part, ImageBlock):
                    self._add_picture(part, inner)
                else:
                    raise _not_here(part, "tool_result", inner)
        self._add_place(MessagePlace(len(self._messages)), block.cache_control, field)
        self._messages.append(ChatMessage("tool", _simplest(self._parts), tool_call_id=block.tool_use_id))
        self._role, self._parts = "", []

    def _add_picture(self, block: ImageBlock, field: str) -> None:
        if not self._takes_pictures:
            raise _unsupported(block, field)
        source = block.source
        url = source.url if isinstance(source, UrlSource) else f"data:{source.media_type};base64,{source.data}"
        name = f"messages[{len(self._messages)}].content[{len(self._parts)}]"
        self._add_part(ChatPicture(url, name), field, block.cache_control)

    def _add_place(self, place: Place, control: CacheControl | None, field: str) -> None:
        self.places[field] = self._last_place = place
        if isinstance(place, MessagePlace):
            self._first_place = self._first_place or place
        if control is not None:
            self.breakpoints.append(Breakpoint(place, control, f"{field}.cache_control"))


def _simplest(parts: Sequence[str | ChatPicture]) -> str | list[str | ChatPicture]:
    """One text is a string: it is the same prompt, whichever way it was written."""
    if not parts:
        return ""
    if len(parts) == 1 and isinstance(parts[0], str):
        return parts[0]
    return list(parts)


def _not_here(block: ContentBlock, role: str, field: str) -> ApiError:
    kinds = {kind for allowed in _ALLOWED.values() for kind in allowed}
    if type(block) not in kinds or role == "tool_result":
        return _unsupported(block, field)
    kind, allowed = block.__struct_config__.tag, ", ".join(f"'{each.__struct_config__.tag}'" for each in _ALLOWED[role])
    return invalid_request(f"{field} is of type '{kind}'; messages of the role '{role}' have {allowed}", field)


def _unsupported(block: ContentBlock, field: str) -> ApiError:
    kind = block.__struct_config__.tag
    return invalid_request(f"content of type '{kind}' is not supported by this model", field, "unsupported_content")
