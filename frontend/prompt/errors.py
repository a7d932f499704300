"""What can be wrong with a prompt. Each is the caller's fault; the API in front says which of its fields it was."""

from __future__ import annotations


class PromptError(ValueError):
    """No prompt can be made of this. The message is for the caller."""


class ChatTemplateError(PromptError):
    """The model's chat template refuses these messages, or there is no chat template."""


class PromptTooLongError(PromptError):
    """The prompt leaves no room for a single output token."""

    def __init__(self, num_tokens: int, max_model_len: int) -> None:
        super().__init__(
            f"the prompt has {num_tokens} tokens; this model's context holds {max_model_len} tokens (max_model_len),"
            f" prompt and output together, so a prompt may have at most {max_model_len - 1}"
        )
        self.num_tokens = num_tokens
        self.max_model_len = max_model_len
