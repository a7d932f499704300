"""KV events as bytes: those that vLLM itself wrote, those that its older consumers read, and what is made of them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ipc.kv_events import (
    AllBlocksCleared,
    BatchEncoder,
    BlockRemoved,
    BlockStored,
    EventsDropped,
    KVEvent,
    KVEventBatch,
    KVEventError,
    KVEventFormat,
    KVEventTable,
    ReplayRequest,
    SnapshotEnd,
    SnapshotRequest,
    decode_batch,
    read_request,
)
from ipc.kv_events.requests import SNAPSHOT_REQUEST

ORACLE = Path(__file__).parent.parent / "data" / "oracle" / "kv_event_vectors.json.gz"
VECTORS: dict[str, Any] = json.loads(gzip.decompress(ORACLE.read_bytes()))

FULL = BlockStored(
    [1, 2], 7, [1, 2, 3, 4], 2, None, "GPU", "sql", [("sql", ("cat", -3), b"\1"), None], 1, "sliding_window", 128
)
EVENTS: list[KVEvent] = [
    FULL,
    BlockStored([b"\2" * 32], None, [5, 6], 2, None, "GPU", None),
    BlockRemoved([1], "GPU", 1),
    BlockRemoved([2, 3], "GPU"),
    AllBlocksCleared(),
]


class OldEvent(msgspec.Struct, array_like=True, tag=True):
    """As consumers of the first releases declare them."""


class OldStored(OldEvent, tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class OldRemoved(OldEvent, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None


class OldCleared(OldEvent, tag="AllBlocksCleared"):
    pass


class OldBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[OldStored | OldRemoved | OldCleared]
    data_parallel_rank: int | None = None


def as_json(batch: KVEventBatch) -> list[Any]:
    """As the vectors show batches."""

    def show(value: object) -> object:
        if isinstance(value, bytes):
            return {"bytes_hex": value.hex()}
        if isinstance(value, msgspec.Struct):
            events = msgspec.structs.asdict(value)
            least = {"parent_block_hash", "lora_id", "medium", "lora_name"}
            shown = {name: show(held) for name, held in events.items() if held is not None or name in least}
            return {"type": type(value).__name__, **shown}
        if isinstance(value, list | tuple):
            return [show(part) for part in value]
        return value

    return [batch.ts, show(batch.events), batch.data_parallel_rank]


@pytest.mark.parametrize("vector", VECTORS["encodings"], ids=lambda vector: vector["name"])
def test_bytes_are_those_of_the_peer_both_ways(vector: dict[str, Any]):
    payload = bytes.fromhex(vector["msgpack_hex"])
    batch = decode_batch(payload)
    assert as_json(batch) == vector["decoded"]
    assert BatchEncoder().encode(batch.ts, batch.events, batch.data_parallel_rank) == payload


@pytest.mark.parametrize("event_format", ["map", "array"])
def test_both_formats_are_told_apart(event_format: KVEventFormat):
    decoded = decode_batch(BatchEncoder(event_format).encode(2.5, EVENTS))
    # What may be anything comes back as lists.
    keys = [("sql", ["cat", -3], b"\1"), None]
    assert decoded == KVEventBatch(2.5, [msgspec.structs.replace(FULL, extra_keys=keys), *EVENTS[1:]], 0)


def test_arrays_are_what_consumers_of_older_releases_read():
    old = msgspec.msgpack.decode(BatchEncoder("array").encode(1.0, EVENTS), type=OldBatch)
    assert old.events == [
        OldStored([1, 2], 7, [1, 2, 3, 4], 2, None, "GPU"),
        OldStored([b"\2" * 32], None, [5, 6], 2, None, "GPU"),
        OldRemoved([1], "GPU"),
        OldRemoved([2, 3], "GPU"),
        OldCleared(),
    ]
    assert old.data_parallel_rank == 0


def test_arrays_of_older_releases_are_read():
    old = OldBatch(1.0, [OldStored([1], None, [5, 6], 2, None, "GPU"), OldRemoved([1], None), OldCleared()])
    first = msgspec.msgpack.encode([1.0, [["BlockStored", [1], None, [5, 6], 2, None]]])
    assert decode_batch(msgspec.msgpack.encode(old)).events == [
        BlockStored([1], None, [5, 6], 2, None, "GPU", None),
        BlockRemoved([1], None),
        AllBlocksCleared(),
    ]
    assert decode_batch(first).events == [BlockStored([1], None, [5, 6], 2, None, None, None)]


@pytest.mark.parametrize("event_format", ["map", "array"])
def test_a_loss_is_a_batch_without_events_to_whoever_does_not_know_of_it(event_format: KVEventFormat):
    payload = BatchEncoder(event_format).encode(1.0, [], dropped=EventsDropped(3, 9))
    assert decode_batch(payload) == KVEventBatch(1.0, [], 0, EventsDropped(3, 9))
    assert msgspec.msgpack.decode(payload, type=OldBatch) == OldBatch(1.0, [], 0)


def test_events_of_a_later_release_are_passed_over():
    payload = msgspec.msgpack.encode([1.0, [{"type": "BlockMoved", "to": 3}, {"type": "AllBlocksCleared"}], 0])
    assert decode_batch(payload).events == [AllBlocksCleared()]
    assert decode_batch(msgspec.msgpack.encode([1.0, [["BlockMoved", 3], ["AllBlocksCleared"]], 0])).events == [
        AllBlocksCleared()
    ]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({}),
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode([1.0, 3]),
        msgspec.msgpack.encode(["now", []]),
        msgspec.msgpack.encode([1.0, [3]]),
        msgspec.msgpack.encode([1.0, [[]]]),
        msgspec.msgpack.encode([1.0, [[["BlockStored"]]]]),
        msgspec.msgpack.encode([1.0, [{"type": "BlockStored"}]]),
        msgspec.msgpack.encode([1.0, [{"type": 3}], 0, 3]),
        msgspec.msgpack.encode([1.0, [{"type": "BlockRemoved", "block_hashes": ["x"], "medium": None}]]),
    ],
)
def test_other_bytes_are_refused(payload: bytes):
    with pytest.raises(KVEventError):
        decode_batch(payload)


def test_requests_are_told_apart():
    assert read_request(ReplayRequest(7).encode()) == ReplayRequest(7)
    assert ReplayRequest(7).encode().hex() == "0000000000000007"
    assert read_request(ReplayRequest(7, b"\5" * 8).encode()) == ReplayRequest(7, b"\5" * 8)
    assert read_request(SNAPSHOT_REQUEST) == SnapshotRequest()
    assert read_request(b"") is read_request(b"\0" * 9) is read_request(b"x" * 17) is None
    end = SnapshotEnd(b"\5" * 8, 12)
    assert SnapshotEnd.decode(end.encode()) == end
    assert SnapshotEnd.decode(b"") is None


def stored(*hashes: int, parent: int | None = None, group: int | None = None) -> BlockStored:
    tokens = [token for block_hash in hashes for token in (block_hash, 0)]
    return BlockStored(list(hashes), parent, tokens, 2, None, "GPU", None, group_idx=group)


def test_a_table_knows_parents_and_tokens():
    table = KVEventTable()
    table.apply([stored(1, 2), stored(3, parent=1)])
    assert {block_hash: (block.parent, block.token_ids) for block_hash, block in table.blocks.items()} == {
        1: (None, (1, 0)),
        2: (1, (2, 0)),
        3: (1, (3, 0)),
    }
    table.apply([BlockRemoved([1, 99], "GPU")])
    assert table.blocks.keys() == {2, 3}
    table.apply([AllBlocksCleared()])
    assert not table.blocks


def test_a_block_is_in_the_table_until_its_last_copy_is_gone():
    """Peers tell of every block by itself, also of those of equal content; each group has its own."""
    table = KVEventTable()
    table.apply([stored(1), stored(1), stored(1, group=1)])
    table.apply([BlockRemoved([1], "GPU")])
    assert table.blocks[1].copies == {("GPU", None): 1, ("GPU", 1): 1}
    table.apply([BlockRemoved([1], "CPU"), BlockRemoved([1], "GPU", 2), BlockRemoved([1], "GPU")])
    assert table.blocks[1].copies == {("GPU", 1): 1}
    table.apply([BlockRemoved([1], "GPU", 1)])
    assert not table.blocks
