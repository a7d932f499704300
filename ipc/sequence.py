"""Numbers that tell whether a message was lost or came twice.

Each side of a session counts what it sends, from a random number on, in the header of the message; a number is used up
only when its message was handed to the socket. The message that opens a side (`Hello`, `Welcome`) says where its count
begins, and `Welcome` names the `Hello` it answers: so nothing of an earlier session can pass for a part of this one,
whoever repeats it. A socket's count goes on when a session begins anew on it, so that a repeated `Hello` is known for
what it is.

`Goodbye` and `Refused` are `UNCOUNTED`: whatever came or did not come before them, the session is over; and an engine
says them to peers it has no session with. Heartbeats are counted, so the loss of the last message is noticed, too.
"""

from __future__ import annotations

import secrets
from typing import Literal

UNCOUNTED = 0

Verdict = Literal["next", "duplicate", "lost"]


def first_sequence() -> int:
    """Where a count begins: above `UNCOUNTED`, far from any other count, and far from the end of its 64 bits."""
    return 1 + secrets.randbits(62)


def judge(sequence: int, expected: int) -> Verdict:
    """`next`: take it. `duplicate`: it was taken before. `lost`: something before it is missing, for good."""
    if sequence == expected:
        return "next"
    return "duplicate" if sequence < expected else "lost"
