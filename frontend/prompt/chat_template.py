"""A model's chat template: a chat → the text the model was trained to continue.

Equal chats give equal texts, since the KV cache finds only what is equal: JSON in them is rendered in canonical order,
and a template that asks for the time is told the beginning of the day (UTC), so that all prompts of a day begin alike.

Special tokens in a message's text are *not* neutralised: the rendered text is tokenized with special tokens
recognised, as every peer does it, because clients rely on it (prompts with tool markup or a thinking switch in
them). A service that relays untrusted text should strip `<|…|>` itself. The tokens that stand for pictures are the
exception, since nothing but a picture may make one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from frontend.tool_calls import calls_in

from .canonical_json import canonical_object
from .chat import Chat, ChatMessage, ChatPicture, Tool
from .errors import ChatTemplateError, PromptError
from .template_program import compile_template, midnight, utc_now

# variables of the template, `messages` among them → the text
Apply = Callable[[dict[str, Any]], str]

# What a template is told by other fields of a request, or calls.
RESERVED_VARIABLES = frozenset(
    "messages tools add_generation_prompt continue_final_message chat_template tokenize strftime_now"
    " raise_exception".split()
)

_PROBE = "foreword-probe"
_END_OF_FINAL_MESSAGE = "\ue000foreword-goes-on-here\ue000"


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """What the template understands was found by trying.

    Attributes:
        takes_strings, takes_parts: forms of `content`.
        takes_tools: it shows the model which tools there are.
        takes_tool_calls: it shows earlier calls of tools, and what they returned.
        tags_tool_calls: it shows them as `frontend.tool_calls` reads them, so that is how the model writes its own.
        image_token: what stands in the text once for each picture; None if the model takes none.
        picture_part: what the template is given for a picture among a message's parts.
    """

    apply: Apply
    takes_strings: bool
    takes_parts: bool
    takes_tools: bool = False
    takes_tool_calls: bool = False
    tags_tool_calls: bool = False
    image_token: str | None = None
    picture_part: Mapping[str, Any] | None = None

    def render(self, chat: Chat) -> str:
        """The prompt's text, with an `image_token` for each picture, in their order, and no other.

        Raises:
            PromptError: JSON in the chat is none, or `variables` holds one of `RESERVED_VARIABLES`.
            ChatTemplateError: what the template said (for instance that roles must alternate), or what of the chat it
                would have left out.
        """
        self._refuse_what_would_be_left_out(chat)
        text = self.render_unchecked(chat)
        self._check_pictures(chat, text)
        return text

    def render_unchecked(self, chat: Chat) -> str:
        """What `render` gives, whatever the template leaves out. Raises the same, but for that."""
        messages = [self._message(message) for message in chat.messages]
        if chat.continue_final_message:
            _mark_end(messages[-1])
        variables = (
            {"documents": None}
            | _variables(chat)
            | {
                "messages": messages,
                "tools": [_tool(tool) for tool in chat.tools] or None,
                "add_generation_prompt": chat.add_generation_prompt,
            }
        )
        try:
            text = self.apply(variables)
        # A template is a program that came with the model: whatever it raises is about this chat.
        except Exception as error:
            raise ChatTemplateError(f"the model's chat template refused the messages: {error}") from error
        return _up_to_mark(text) if chat.continue_final_message else text

    def _refuse_what_would_be_left_out(self, chat: Chat) -> None:
        does_not_show = "this model's chat template does not show"
        if chat.pictures and self.image_token is None:
            raise ChatTemplateError("this model takes no pictures", chat.pictures[0].field)
        if chat.tools and not self.takes_tools:
            raise ChatTemplateError(f"{does_not_show} tools to the model", "tools")
        for i, message in enumerate(chat.messages):
            if message.tool_calls and not self.takes_tool_calls:
                raise ChatTemplateError(f"{does_not_show} calls of tools to the model", f"messages[{i}].tool_calls")
            if message.role == "tool" and not self.takes_tool_calls:
                raise ChatTemplateError(f"{does_not_show} results of tools to the model", f"messages[{i}].role")

    def _check_pictures(self, chat: Chat, text: str) -> None:
        num_pictures, num_tokens = len(chat.pictures), 0
        if self.image_token is not None:
            num_tokens = text.count(self.image_token)
        if num_tokens > num_pictures:
            raise ChatTemplateError(
                f"the messages hold {num_pictures} pictures, but the model's image token '{self.image_token}' comes"
                f" {num_tokens} times in what its chat template makes of them; no text may spell it"
            )
        if num_tokens < num_pictures:
            field = self._picture_left_out(chat, num_tokens)
            raise ChatTemplateError("this model's chat template does not show a picture in this place", field)

    def _picture_left_out(self, chat: Chat, num_tokens: int) -> str | None:
        """The first picture without which there are as many image tokens."""
        assert self.image_token is not None
        for picture in chat.pictures:
            try:
                text = self.render_unchecked(_without(chat, picture))
            except ChatTemplateError:
                continue
            if text.count(self.image_token) == num_tokens:
                return picture.field
        return None

    def _message(self, message: ChatMessage) -> dict[str, Any]:
        as_dict: dict[str, Any] = {"role": message.role, "content": self._content(message.content)}
        if message.name is not None:
            as_dict["name"] = message.name
        if message.tool_calls:
            as_dict["tool_calls"] = [
                _tool_call(call.id, call.name, canonical_object(call.arguments)) for call in message.tool_calls
            ]
        if message.tool_call_id is not None:
            as_dict["tool_call_id"] = message.tool_call_id
        return as_dict

    def _content(self, content: str | Sequence[str | ChatPicture]) -> str | list[dict[str, Any]]:
        if isinstance(content, str):
            return content if self.takes_strings else [_text_part(content)]
        if self.takes_parts:
            return [_text_part(part) if isinstance(part, str) else self._picture_part() for part in content]
        return "\n".join(part if isinstance(part, str) else self.image_token or "" for part in content)

    def _picture_part(self) -> dict[str, Any]:
        assert self.picture_part is not None
        return dict(self.picture_part)


def chat_template_of(
    tokenizer: Any, now: Callable[[], datetime] = utc_now, image_token: str | None = None
) -> ChatTemplate | None:
    """The chat template of a transformers tokenizer; None if it has none. `image_token` is that of the model, if any.

    The template sees the date of `now()`, with 00:00 for the time of day. Raises jinja2.TemplateSyntaxError, and
    ValueError if the tokenizer has several templates and none for all purposes.
    """
    if tokenizer.chat_template is None:
        return None
    special_tokens = tokenizer.special_tokens_map
    default = compile_template(tokenizer.get_chat_template())
    with_tools = compile_template(tokenizer.get_chat_template(tools=[]))

    def apply(variables: dict[str, Any]) -> str:
        program = with_tools if _is_about_tools(variables) else default
        # One moment for the whole text, though it may be rendered over midnight.
        return program.render(special_tokens | variables, strftime_now=midnight(now()).strftime)

    with_part = _try(apply, _user([_text_part(_PROBE)]))
    # A template that knows only strings may print a list as Python would.
    takes_parts = _PROBE in with_part and "'text'" not in with_part
    takes_strings = _PROBE in _try(apply, _user(_PROBE)) or not takes_parts
    content: Callable[[str], Any] = str if takes_strings else lambda text: [_text_part(text)]
    called = _called_probe(content)
    with_calls = [_try(apply, called), _try(apply, called | {"tools": [_OTHER_TOOL]})]
    return ChatTemplate(
        apply,
        takes_strings=takes_strings,
        takes_parts=takes_parts,
        takes_tools=_PROBE in _try(apply, _user(content("Hi")) | {"tools": [_PROBE_TOOL]}),
        takes_tool_calls=any(_PROBE in text and _PROBE_RESULT in text for text in with_calls),
        tags_tool_calls=any(calls_in(text, (_PROBE,)) for text in with_calls),
        image_token=image_token,
        picture_part=None if image_token is None else _picture_part(apply, image_token),
    )


def _variables(chat: Chat) -> dict[str, Any]:
    if chat.variables is None:
        return {}
    variables = canonical_object(chat.variables)
    if reserved := sorted(RESERVED_VARIABLES & variables.keys()):
        field = chat.variables.field
        raise PromptError(f"{field} must not set '{reserved[0]}'; that is for other fields to say", field)
    return variables


def _tool(tool: Tool) -> dict[str, Any]:
    """In the order the API's documentation has, which is what models were trained on; only the schema is sorted."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.parameters is not None:
        function["parameters"] = canonical_object(tool.parameters)
    return {"type": "function", "function": function}


def _tool_call(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _without(chat: Chat, picture: ChatPicture) -> Chat:
    messages = [
        message
        if isinstance(message.content, str)
        else replace(message, content=[part for part in message.content if part is not picture])
        for message in chat.messages
    ]
    return replace(chat, messages=messages)


def _picture_part(apply: Apply, image_token: str) -> dict[str, Any]:
    """The part that makes the template say `image_token` once; a text that does where it knows no such part."""
    for part in ({"type": "image"}, {"type": "image_url", "image_url": {"url": ""}}):
        text = _try(apply, _user([part, _text_part(_PROBE)]))
        if text.count(image_token) == 1 and _PROBE in text:
            return part
    return _text_part(image_token)


def _mark_end(message: dict[str, Any]) -> None:
    """The space tells whether the template trims what it is given."""
    mark = _END_OF_FINAL_MESSAGE + " "
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + mark
    elif content and "text" in content[-1]:
        content[-1]["text"] += mark
    else:
        content.append(_text_part(mark))


def _up_to_mark(text: str) -> str:
    before, mark, after = text.rpartition(_END_OF_FINAL_MESSAGE)
    if not mark:
        raise ChatTemplateError(
            "this model's chat template does not show the end of the last message", "continue_final_message"
        )
    return before if after.startswith(" ") else before.rstrip()


def _is_about_tools(variables: dict[str, Any]) -> bool:
    return bool(variables["tools"]) or any(
        message["role"] == "tool" or "tool_calls" in message for message in variables["messages"]
    )


def _try(apply: Apply, variables: dict[str, Any]) -> str:
    try:
        return apply({"tools": None, "documents": None, "add_generation_prompt": True} | variables)
    except Exception:  # see ChatTemplate.render
        return ""


_PROBE_RESULT = "foreword-result"
# Some templates take only nine letters or digits.
_PROBE_CALL_ID = "probecall"


def _probe_tool(name: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"x": {"type": "string", "description": "X."}}, "required": ["x"]}
    return {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": schema}}


_PROBE_TOOL, _OTHER_TOOL = _probe_tool(_PROBE), _probe_tool("other")


def _user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def _called_probe(content: Callable[[str], Any]) -> dict[str, Any]:
    call = _tool_call(_PROBE_CALL_ID, _PROBE, {"x": "y"})
    return {
        "messages": [
            {"role": "user", "content": content("Hi")},
            {"role": "assistant", "content": content(""), "tool_calls": [call]},
            {"role": "tool", "content": content(_PROBE_RESULT), "tool_call_id": _PROBE_CALL_ID},
        ]
    }
