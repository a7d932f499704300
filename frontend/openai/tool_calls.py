"""Tools of the OpenAI API whose calls an answer shows, and how it shows them."""

from __future__ import annotations

import uuid

from frontend.choice import CallableTools, Part, callable_tools
from frontend.serving import Serving

from .protocol import ChatCompletionRequest
from .responses import FunctionCall, ToolCallDelta


def tools_of(serving: Serving, request: ChatCompletionRequest) -> CallableTools | None:
    """See `callable_tools`."""
    names = [tool.function.name for tool in request.tools or () if request.tool_choice != "none"]
    template = serving.prompts.tokenizer.chat_template
    return callable_tools(template, names, in_parallel=request.parallel_tool_calls is not False)


class CallNumbers:
    """Gives the calls of one choice their ids and numbers."""

    def __init__(self) -> None:
        self._num_calls = 0

    def shown(self, part: Part) -> ToolCallDelta | None:
        """The call in `part`, if there is one. Each part is to be shown once."""
        if part.call is None:
            return None
        function = FunctionCall(part.call.name, part.call.arguments)
        call = ToolCallDelta(id=f"call_{uuid.uuid4().hex}", function=function, index=self._num_calls)
        self._num_calls += 1
        return call
