"""Why an engine does not do what it was asked."""

from __future__ import annotations

from ipc.vocabulary import RequestError


class EngineUnavailableError(Exception):
    """There is no engine right now, or it was lost while the request ran. Worth trying again later."""


class RequestRefusedError(Exception):
    """The engine will not (or no longer) compute this request. `error` says why and whose fault it is."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.message)
        self.error = error
