"""What can be wrong with a prompt. Each is the caller's fault; the API in front says which of its fields it was."""

from __future__ import annotations


class PromptError(ValueError):
    """No prompt can be made of this. The message is for the caller.

    `field` is the part of the chat at fault (`tools`, `messages[2].tool_calls`), where it is not all of the prompt.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ChatTemplateError(PromptError):
    """The model's chat template refuses this chat, or would leave out a part of it, or there is no chat template."""


class PromptTooLongError(PromptError):
    """The prompt leaves no room for a single output token.

    With `num_bytes`, the length of the text, `num_tokens` is not the true number but one that it reaches at least.
    """

    def __init__(self, num_tokens: int, max_model_len: int, num_bytes: int | None = None) -> None:
        known = "" if num_bytes is None else f"{num_bytes} bytes of text, at least "
        super().__init__(f"the prompt has {known}{num_tokens} tokens; at most {max_model_len - 1} fit")
        self.num_tokens = num_tokens
        self.max_model_len = max_model_len
        self.num_bytes = num_bytes
