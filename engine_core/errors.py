"""What the engine core raises."""

from __future__ import annotations


class InvalidRequestError(ValueError):
    """The request can never run here, whatever the load. `param` names the field at fault."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class InvalidConfigError(ValueError):
    """The engine cannot be built as configured. The message names the setting and the true numbers."""
