"""What clients of the Anthropic API may send. The types are the validation; the descriptions are the documentation.

`None` means "not given" everywhere: answers that are sent back have null for what they leave out. A field that is not
named here is refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from frontend.prompt.cache_options import CacheControl, CacheOptions
from frontend.prompt.cache_salt import CacheSalt
from frontend.request_fields import Ignored, Int64, JsonObject, NotYet

Breakpoint = Annotated[
    CacheControl | None,
    Meta(description="Keep the prompt up to the end of this in the cache. At most four in a request."),
]


class TextBlock(Struct, forbid_unknown_fields=True, tag="text", tag_field="type"):
    text: str
    cache_control: Breakpoint = None
    citations: Annotated[list[Any] | None, Ignored] = None


class Base64Source(Struct, forbid_unknown_fields=True, tag="base64", tag_field="type"):
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp", "image/bmp", "image/tiff"]
    data: str


class UrlSource(Struct, forbid_unknown_fields=True, tag="url", tag_field="type"):
    url: Annotated[
        str,
        Meta(description="Where the server allows it, `http(s)://…` or `file:///…`; or `data:image/png;base64,…`."),
    ]


class ImageBlock(Struct, forbid_unknown_fields=True, tag="image", tag_field="type"):
    source: Base64Source | UrlSource
    cache_control: Breakpoint = None


class DocumentBlock(Struct, tag="document", tag_field="type"):
    source: Annotated[Any, NotYet] = None


class ToolUseBlock(Struct, forbid_unknown_fields=True, tag="tool_use", tag_field="type"):
    """A call that the assistant asked for, as an answer has it."""

    id: str
    name: str
    input: JsonObject
    cache_control: Breakpoint = None
    caller: Annotated[Any, Ignored] = None
    toolset_name: Annotated[str | None, Ignored] = None


class ToolResultBlock(Struct, forbid_unknown_fields=True, tag="tool_result", tag_field="type"):
    """What a call returned."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    is_error: Annotated[bool | None, Meta(description="The model sees `Error: ` before the content.")] = None
    cache_control: Breakpoint = None
    toolset_name: Annotated[str | None, Ignored] = None


class ThinkingBlock(Struct, forbid_unknown_fields=True, tag="thinking", tag_field="type"):
    """Left out of the prompt."""

    thinking: str
    signature: Annotated[str | None, Ignored] = None


class RedactedThinkingBlock(Struct, forbid_unknown_fields=True, tag="redacted_thinking", tag_field="type"):
    """Left out of the prompt."""

    data: Annotated[str, Ignored]


ContentBlock = (
    TextBlock | ImageBlock | DocumentBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock
)


class InputMessage(Struct, forbid_unknown_fields=True, kw_only=True):
    """One turn, or a part of it: turns of one role that follow each other are one. An answer can be sent back."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        str | list[ContentBlock],
        Meta(
            description="A string is one block of text. Users' messages may have texts, pictures and results of tools,"
            " assistants' texts and calls of tools, system messages texts. The last one may be the assistant's: the"
            " answer goes on with it."
        ),
    ]


class ToolDefinition(Struct, forbid_unknown_fields=True, kw_only=True):
    name: Annotated[str, Meta(min_length=1)]
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: Annotated[
        JsonObject, Meta(description="JSON schema of the input. The order of its keys does not matter.")
    ]
    cache_control: Breakpoint = None
    eager_input_streaming: Annotated[bool | None, Ignored] = None
    strict: Annotated[bool | None, NotYet] = None
    defer_loading: Annotated[bool | None, NotYet] = None
    allowed_callers: Annotated[list[str] | None, NotYet] = None
    input_examples: Annotated[list[Any] | None, NotYet] = None


class ToolChoiceAuto(Struct, forbid_unknown_fields=True, tag="auto", tag_field="type"):
    disable_parallel_tool_use: Annotated[
        bool | None, Meta(description="With true, calls after the first are left out of an answer.")
    ] = None


class ToolChoiceNone(Struct, forbid_unknown_fields=True, tag="none", tag_field="type"):
    """The model still sees the tools, so that the cache finds them; a call it makes even so is text."""


class ToolChoiceAny(Struct, tag="any", tag_field="type"):
    """Not supported yet."""


class ToolChoiceTool(Struct, tag="tool", tag_field="type"):
    """Not supported yet."""


class Metadata(Struct, forbid_unknown_fields=True):
    user_id: Annotated[str | None, Ignored] = None


class PromptFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """What a prompt is made of, and what its cost depends on."""

    model: Annotated[str | None, Meta(description="A served model's name; default the first one served.")] = None
    messages: list[InputMessage]
    system: Annotated[
        str | list[TextBlock] | None, Meta(description="Comes before all messages, as a turn of the role `system`.")
    ] = None
    tools: Annotated[
        list[ToolDefinition] | None, Meta(description="What the model is shown of your tools, in this order.")
    ] = None
    tool_choice: Annotated[
        ToolChoiceAuto | ToolChoiceNone | ToolChoiceAny | ToolChoiceTool | None,
        Meta(description="Of the type `auto` (default) or `none`."),
    ] = None
    cache_control: Annotated[
        CacheControl | None,
        Meta(description="The same at the last block of the last message that can have one."),
    ] = None
    cache_salt: Annotated[
        CacheSalt | None,
        Meta(
            description="Share cached prefixes only with requests of the same salt. 1 to 128 characters, none of"
            " `@`, `/`, `\\`, NUL. As an object, from a place on, which may also be `system` or `system[1]`: what comes"
            " before is shared by all."
        ),
    ] = None

    thinking: Annotated[Any, NotYet] = None
    output_config: Annotated[Any, NotYet] = None
    context_management: Annotated[Any, NotYet] = None
    mcp_servers: Annotated[Any, NotYet] = None
    speed: Annotated[Any, NotYet] = None


class MessagesRequest(PromptFields, forbid_unknown_fields=True, kw_only=True):
    max_tokens: Annotated[
        Int64, Meta(description="Most tokens to generate. 0: the prompt is computed, and then cached; nothing follows.")
    ]
    stream: Annotated[bool | None, Meta(description="Answer with server-sent events.")] = None
    temperature: Annotated[Annotated[float, Meta(ge=0, le=2)] | None, Meta(description="0 is greedy; default 1.")] = (
        None
    )
    top_p: Annotated[Annotated[float, Meta(gt=0, le=1)] | None, Meta(description="1 (default) is off.")] = None
    top_k: Annotated[Annotated[int, Meta(ge=0, le=2**31 - 1)] | None, Meta(description="0 (default) is off.")] = None
    stop_sequences: Annotated[
        list[str] | None,
        Meta(description="Up to 16 strings that end the text; the one that ended it is not part of it."),
    ] = None
    cache: Annotated[CacheOptions | None, Meta(description="How this request uses the prefix cache.")] = None

    metadata: Annotated[Metadata | None, Ignored] = None
    service_tier: Annotated[str | None, Ignored] = None
    inference_geo: Annotated[str | None, Ignored] = None
    container: Annotated[Any, NotYet] = None
    diagnostics: Annotated[Any, NotYet] = None
    thread: Annotated[
        Any, Meta(description="Refused with a code by which SDKs know to send the whole conversation each time.")
    ] = None


class CountTokensRequest(PromptFields, forbid_unknown_fields=True, kw_only=True):
    """Of a prompt, as `/v1/messages` takes it."""
