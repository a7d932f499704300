"""KV cache events and their bytes: MessagePack, as vLLM writes it.

A batch is an array `[time, events, data-parallel rank]`. An event is a map whose first entry is its type and whose
optional fields are left out where they are None; older releases wrote arrays, the type first (`KVEventFormat`).

One thing is added. Where batches were dropped, a batch without events says so in a fourth element of its array, which
decoders made for three do not look at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct

KVEventFormat = Literal["map", "array"]
# All of it, or its last 8 bytes as a big-endian number.
BlockHash: TypeAlias = int | bytes


class KVEventError(ValueError):
    """These bytes are no batch of KV events."""


class BlockStored(Struct, frozen=True, omit_defaults=True, tag_field="type", tag=True):
    """Blocks that can be found from now on, each after the one before it, the first after `parent_block_hash`.

    `token_ids` are those of all blocks, `block_size` of each. `extra_keys` has an entry for each block: what besides
    tokens its hash is made of, or None. `medium` is where the blocks are. `group_idx` is the KV cache group they are
    of, `kv_cache_spec_kind` what its layers see (`full_attention` or `sliding_window`, of
    `kv_cache_spec_sliding_window` tokens). The last three come from peers alone.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(Struct, frozen=True, omit_defaults=True, tag_field="type", tag=True):
    """Blocks that can be found no more in this medium and group."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(Struct, frozen=True, tag_field="type", tag=True):
    """Nothing that was stored before can be found any more."""


class EventsDropped(Struct, frozen=True, tag_field="type", tag=True):
    """Not all subscribers were sent the batches numbered `first_sequence` … `last_sequence`, or nobody was.

    Whoever has them all has lost nothing.
    """

    first_sequence: int
    last_sequence: int


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(Struct, array_like=True, frozen=True):
    """What one engine step changed, in order. `ts` is wall-clock time in seconds."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None
    dropped: EventsDropped | None = None


# How many fields the arrays of all releases have; what follows is optional, and left out at the end.
_NUM_ALWAYS_WRITTEN = {BlockStored: 7, BlockRemoved: 2, AllBlocksCleared: 0, EventsDropped: 2}
_BY_TAG: dict[str, Any] = {kind.__name__: kind for kind in _NUM_ALWAYS_WRITTEN}


class BatchEncoder:
    """Encodes batches in one format. For one thread at a time."""

    def __init__(self, event_format: KVEventFormat = "map") -> None:
        self._is_array = event_format == "array"
        self._encoder = msgspec.msgpack.Encoder()

    def encode(
        self,
        ts: float,
        events: Sequence[KVEvent],
        data_parallel_rank: int | None = 0,
        dropped: EventsDropped | None = None,
    ) -> bytes:
        written: Sequence[object] = [_as_array(event) for event in events] if self._is_array else events
        batch: tuple[object, ...] = (float(ts), written, data_parallel_rank)
        if dropped is not None:
            batch += (_as_array(dropped) if self._is_array else dropped,)
        return self._encoder.encode(batch)


def _as_array(event: KVEvent | EventsDropped) -> list[object]:
    values = list(msgspec.structs.astuple(event))
    least = _NUM_ALWAYS_WRITTEN[type(event)]
    while len(values) > least and values[-1] is None:
        values.pop()
    return [type(event).__name__, *values]


_maps = msgspec.msgpack.Decoder(KVEventBatch)


def decode_batch(payload: bytes | memoryview) -> KVEventBatch:
    """A batch in either format. Events of a type that is not known here are passed over.

    Raises:
        KVEventError: it is none.
    """
    try:
        return _maps.decode(payload)
    except msgspec.ValidationError:
        pass
    except msgspec.DecodeError as error:
        raise KVEventError(f"no batch of KV events: {error}") from error
    try:
        ts, events, *more = msgspec.msgpack.decode(payload, type=list[Any])
        rank, dropped = [*more, None, None][:2]
        read = [_read_event(event) for event in events]
        return KVEventBatch(
            msgspec.convert(ts, float),
            [event for event in read if isinstance(event, KVEvent)],
            msgspec.convert(rank, int | None),
            None if dropped is None else msgspec.convert(_read_event(dropped), EventsDropped | None),
        )
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise KVEventError(f"no batch of KV events: {error}") from error


def _read_event(value: object) -> KVEvent | EventsDropped | None:
    if isinstance(value, dict):
        kind = _BY_TAG.get(value.get("type", ""))
        return None if kind is None else msgspec.convert(value, kind)
    if not isinstance(value, list) or not value:
        raise ValueError(f"an event must be a map or an array, got {value!r:.80}")
    kind = _BY_TAG.get(value[0])
    if kind is None:
        return None
    fields = dict(zip(kind.__struct_fields__, value[1:]))
    # Old releases wrote fewer than are asked for now.
    missing = dict.fromkeys(kind.__struct_fields__[len(value) - 1 : _NUM_ALWAYS_WRITTEN[kind]])
    return msgspec.convert({"type": value[0], **fields, **missing}, kind)
