"""What the engine core raises."""

from __future__ import annotations


class InvalidRequestError(ValueError):
    """The request can never run here, whatever the load. `param` names the field at fault."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class EngineOverloadedError(Exception):
    """The queue is as long as it may be; the request was not added.

    `reason` is the limit (`max_num_queued_reqs`, `max_num_queued_tokens`), `retry_after_s` an estimate of when there
    will be room for it again.
    """

    def __init__(self, message: str, reason: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class InvalidConfigError(ValueError):
    """The engine cannot be built as configured. The message names the setting and the true numbers."""


class AdapterError(ValueError):
    """An adapter cannot be loaded or unloaded. `reason` is one of those of `ipc.messages.AdapterAnswer`; `param` is
    `lora_name` or `lora_path`, whichever is at fault.
    """

    def __init__(self, message: str, reason: str, param: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.param = param
