"""Fields of the API that are known and not done yet: refused where they would change the answer."""

from __future__ import annotations

from typing import Any

from frontend.errors import invalid_request, not_supported

from .protocol import MessagesRequest, PromptFields, ToolChoiceAny, ToolChoiceTool

# field → values that change nothing, besides null
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "thinking": ({"type": "disabled"},),
    "output_config": ({},),
    "context_management": ({}, {"edits": []}),
    "mcp_servers": ([],),
    "speed": ("standard",),
}
_NEUTRAL_IN_ANSWERS: dict[str, tuple[Any, ...]] = {**_NEUTRAL, "container": (), "diagnostics": ()}
_NEUTRAL_IN_TOOLS: dict[str, tuple[Any, ...]] = {
    "strict": (False,),
    "defer_loading": (False,),
    "allowed_callers": (["direct"],),
    "input_examples": ([],),
}


def refuse_unsupported(request: PromptFields) -> None:
    """Raises ApiError (400) naming the first field whose value asks for something that is not done yet."""
    _refuse(request, _NEUTRAL_IN_ANSWERS if isinstance(request, MessagesRequest) else _NEUTRAL, "")
    if isinstance(request, MessagesRequest) and request.thread is not None:
        raise invalid_request(
            "thread: this server keeps no conversations; send all messages each time",
            "thread",
            "thread_unsupported_request",
        )
    if isinstance(request.tool_choice, ToolChoiceAny | ToolChoiceTool):
        kind = request.tool_choice.__struct_config__.tag
        raise not_supported("tool_choice", f"tool_choice of type '{kind}'")
    for i, tool in enumerate(request.tools or ()):
        _refuse(tool, _NEUTRAL_IN_TOOLS, f"tools[{i}].")


def _refuse(fields: Any, neutral: dict[str, tuple[Any, ...]], path: str) -> None:
    for name, values in neutral.items():
        value = getattr(fields, name)
        if value is not None and value not in values:
            field = f"{path}{name}"
            raise not_supported(field, f"{field} = {value!r}" if isinstance(value, str | int | float) else field)
