"""What the scheduler decided for one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from ipc.vocabulary import RequestError, RequestOutput

from .request import Request
from .runner import ScheduledRequest, SlotCopy


class RequestFailedError(Exception):
    """`request` cannot go on, while others can; `reason` is what its caller is told."""

    def __init__(self, request: Request, reason: RequestError) -> None:
        super().__init__(reason.message)
        self.request = request
        self.reason = reason


@dataclass(slots=True)
class Step:
    """One scheduled step: what to compute, in batch order, and who had to give way for it.

    `copies` are to be made first; `failed` are the last words of requests that ended before it
    for want of a picture, or because their adapter could not be placed.
    """

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    copies: list[SlotCopy] = field(default_factory=list)
    failed: list[RequestOutput] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.scheduled)

    def drop(self, request: Request) -> int:
        """Take `request` out, if it is in; returns of how many tokens."""
        for place, entry in enumerate(self.scheduled):
            if entry.request is request:
                del self.scheduled[place]
                return entry.num_tokens
        return 0
