"""One frontend's session as the engine sees it: what is in flight, what waits, and the numbers of its messages."""

from __future__ import annotations

import errno
from collections import deque
from dataclasses import dataclass, field

import zmq

from ipc.codec import WireError, encode
from ipc.messages import EngineMessage, EngineOutputs
from ipc.sequence import UNCOUNTED, Verdict, first_sequence, judge
from ipc.vocabulary import RequestOutput


class FrontendLostError(Exception):
    """It is `disconnected`, or cannot be told what it must be told (`unsendable_message`; `detail` says why)."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.detail = detail


@dataclass(slots=True, eq=False)
class FrontendSession:
    """`engine_ids` has its unfinished requests: its own id → the engine's.

    `backlog` is what its socket had no room for, `expected` the number that its next message must have.
    """

    identity: bytes
    last_heard_s: float
    expected: int
    engine_ids: dict[str, str] = field(default_factory=dict)
    backlog: deque[EngineMessage] = field(default_factory=deque)
    _next_sequence: int = field(default_factory=first_sequence)
    # Of the outputs that wait last: which can be added to, and what they weigh.
    _last_outputs: dict[tuple[str, int], RequestOutput] = field(default_factory=dict)
    _last_weight: int = 0

    def judge(self, sequence: int) -> Verdict:
        """Whether the message with this number, just received, is to be taken; the one after it is expected then."""
        verdict = judge(sequence, self.expected)
        if verdict == "next":
            self.expected += 1
        return verdict

    def keep(self, message: EngineMessage, max_merged_tokens: int) -> None:
        """Let `message` wait. Outputs join the outputs that wait last, if together they have no more tokens than that.

        So a frontend that reads more slowly than steps are computed gets fewer, larger messages, and keeps up.
        """
        if not isinstance(message, EngineOutputs):
            self.backlog.append(message)
            return
        weight = sum(_weight(output) for output in message.outputs)
        last = self.backlog[-1] if self.backlog else None
        if not isinstance(last, EngineOutputs) or self._last_weight + weight > max_merged_tokens:
            self.backlog.append(last := EngineOutputs())
            self._last_outputs, self._last_weight = {}, 0
        self._last_weight += weight
        for output in message.outputs:
            key = output.request_id, output.index
            before = self._last_outputs.get(key)
            # An end keeps its place: moved forward it would end the request before its other continuations' last words.
            if before is not None and before.finish_reason is None and output.finish_reason is None:
                before.absorb(output)
            else:
                last.outputs.append(output)
                self._last_outputs[key] = output

    def send(self, router: zmq.Socket[bytes], epoch: int, message: EngineMessage) -> bool:
        """Send `message` with the session's next number, which an attempt without success leaves to the next.

        False if there is no room. Raises FrontendLostError.
        """
        sent = send(router, self.identity, epoch, message, self._next_sequence)
        if sent:
            self._next_sequence += 1
        return sent


def _weight(output: RequestOutput) -> int:
    """About how many tokens there are in it, those that are only reported included; what an error says weighs more.

    A frontend can cause any number of errors, with ids as long as it likes: they must not all join one message.
    """
    reported = [*(output.logprobs or ()), *(output.prompt_logprobs or ())]
    said = 0 if output.error is None else len(output.request_id) + len(output.error.message)
    return 1 + said + len(output.new_token_ids) + sum(1 + len(entry.top) for entry in reported if entry is not None)


def send(
    router: zmq.Socket[bytes], identity: bytes, epoch: int, message: EngineMessage, sequence: int = UNCOUNTED
) -> bool:
    """Hand `message` to the socket without waiting; False if the peer's queue is full. Raises FrontendLostError."""
    try:
        router.send_multipart([identity, *encode(message, epoch, sequence)], zmq.DONTWAIT, copy=False)
    except zmq.Again:
        return False
    except zmq.ZMQError as error:
        if error.errno != errno.EHOSTUNREACH:
            raise
        raise FrontendLostError("disconnected") from error
    except WireError as error:
        raise FrontendLostError("unsendable_message", str(error)) from error
    return True
