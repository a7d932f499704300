"""What KV cache an engine has, told to others as it changes: the events, their bytes, and the consumer's side.

    from ipc.kv_events import KVEventSubscriber, KVEventTable

The wire format is vLLM's (`docs/kv_events.md`), so its consumers can read our events, and these classes its events.
"""

from .events import (
    AllBlocksCleared,
    BatchEncoder,
    BlockHash,
    BlockRemoved,
    BlockStored,
    EventsDropped,
    KVEvent,
    KVEventBatch,
    KVEventError,
    KVEventFormat,
    decode_batch,
)
from .requests import (
    END_OF_ANSWER,
    SNAPSHOT_REQUEST,
    ReplayRequest,
    SnapshotEnd,
    SnapshotRequest,
    read_request,
)
from .subscriber import KVEventSubscriber, NumberedBatch
from .table import KVEventTable, TableBlock

__all__ = [
    "END_OF_ANSWER",
    "SNAPSHOT_REQUEST",
    "AllBlocksCleared",
    "BatchEncoder",
    "BlockHash",
    "BlockRemoved",
    "BlockStored",
    "EventsDropped",
    "KVEvent",
    "KVEventBatch",
    "KVEventError",
    "KVEventFormat",
    "KVEventSubscriber",
    "KVEventTable",
    "NumberedBatch",
    "ReplayRequest",
    "SnapshotEnd",
    "SnapshotRequest",
    "TableBlock",
    "decode_batch",
    "read_request",
]
