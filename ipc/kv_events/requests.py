"""What a consumer can ask at the replay socket, a ROUTER, and how answers end.

A request has the frames `["", what]` (a REQ socket adds the empty one itself). The answer is any number of
`["", topic, sequence, payload]` and then `["", "", END_OF_ANSWER, more]`.

| what | answer |
| --- | --- |
| 8 bytes: a sequence number | the buffered batches from that number on; `more` is empty (vLLM's replay) |
| 16 bytes: a sequence number, an epoch | the same, if the epoch is the publisher's; `more` is the publisher's epoch |
| `SNAPSHOT_REQUEST` | batches that make the whole table; `more` is a `SnapshotEnd` |

An epoch is 8 bytes, drawn when an engine starts: sequence numbers begin at 0 again then. To vLLM's publisher a snapshot
request is one for a replay from a very large number, which it answers with the end alone.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

END_OF_ANSWER = b"\xff" * 8
SNAPSHOT_REQUEST = b"foreword.snapshot"
NUMBER_BYTES = 8


class ReplayRequest(NamedTuple):
    """`epoch` is None where the consumer knows none."""

    first_sequence: int
    epoch: bytes | None = None

    def encode(self) -> bytes:
        return encode_number(self.first_sequence) + (self.epoch or b"")


class SnapshotRequest(NamedTuple):
    pass


class SnapshotEnd(NamedTuple):
    """The snapshot is the table before the batch numbered `next_sequence`."""

    epoch: bytes
    next_sequence: int

    def encode(self) -> bytes:
        return self.epoch + encode_number(self.next_sequence)

    @classmethod
    def decode(cls, data: bytes) -> SnapshotEnd | None:
        """None if it is none: the peer knows no snapshots."""
        if len(data) != 2 * NUMBER_BYTES:
            return None
        return cls(data[:NUMBER_BYTES], decode_number(data[NUMBER_BYTES:]))


Request: TypeAlias = ReplayRequest | SnapshotRequest


def read_request(data: bytes) -> Request | None:
    """None if it is none of these."""
    if data == SNAPSHOT_REQUEST:
        return SnapshotRequest()
    if len(data) not in (NUMBER_BYTES, 2 * NUMBER_BYTES):
        return None
    return ReplayRequest(decode_number(data[:NUMBER_BYTES]), data[NUMBER_BYTES:] or None)


def encode_number(number: int) -> bytes:
    return number.to_bytes(NUMBER_BYTES, "big")


def decode_number(data: bytes) -> int:
    return int.from_bytes(data, "big")
