"""Reading the peer's traces (tests/data/oracle), in our numbering."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

from engine_core.kv_cache import BlockHasher, BlockPool
from engine_core.request import Request
from ipc.vocabulary import ExtraKeySpan
from tests.engine_core.make import make_request

ORACLE = Path(__file__).parent.parent / "data" / "oracle"
EVICTION_POLICIES = {"native": "unhashed_first", "append_all": "lru"}


def trace_names(kind: str) -> list[str]:
    return sorted(path.name.split(".")[0] for path in (ORACLE / kind).glob("*.expected.jsonl.gz"))


def read_trace(kind: str, name: str) -> tuple[dict, list[dict]]:
    """The header and the recorded operations."""
    with gzip.open(ORACLE / kind / f"{name}.expected.jsonl.gz", "rt") as lines:
        header, *records = (json.loads(line) for line in lines)
    return header, records


def make_hasher(header: dict) -> BlockHasher:
    """The caller has to unset PYTHONHASHSEED."""
    return BlockHasher(header["hash_algo"], header["block_size"], seed=header["root_seed"])


def request_of(op: dict) -> Request:
    """The request a frontend would send for a `new_request` or `add` operation."""
    spans = []
    if lora := op.get("lora"):
        name, path = (lora, f"/lora/{lora}") if isinstance(lora, str) else (lora["name"], lora["path"])
        spans.append(ExtraKeySpan(0, None, "lora", path, label=name))
    for feature in op.get("mm") or ():
        start = feature["offset"]
        spans.append(ExtraKeySpan(start, start + feature["length"], "mm", feature["identifier"]))
    if salt := op.get("salt"):
        spans.append(ExtraKeySpan(0, 1, "cache_salt", salt))
    return make_request(
        op["id"],
        op["tokens"],
        max_tokens=op.get("max_tokens") or 16,
        extra_key_spans=tuple(spans),
        priority=op.get("priority") or 0,
        arrival_time_s=op.get("arrival_time") or 0.0,
        read_prefix_cache=not op.get("skip_reading_prefix_cache"),
        stop_token_ids=tuple(op.get("stop_token_ids") or ()),
    )


def ours(block_ids: Sequence[int]) -> list[int]:
    return [block_id - 1 for block_id in block_ids]


def free_queue(pool: BlockPool) -> list[int]:
    return [block.block_id for block in pool.free_queue]


def cached_blocks(pool: BlockPool, hex_len: int) -> dict[int, str]:
    return {b.block_id: b.block_hash.hex()[:hex_len] for b in pool.blocks if b.block_hash is not None}


def ref_counts(pool: BlockPool) -> dict[int, int]:
    return {block.block_id: block.ref_cnt for block in pool.blocks if block.ref_cnt}


def peer_cached_blocks(state: dict) -> dict[int, str]:
    return {int(block_id) - 1: digest for block_id, digest in state["cached_blocks"].items()}


def duplicates(pool: BlockPool, hex_len: int) -> dict[str, list[int]]:
    copies = pool.tree.copies()
    return {
        digest.hex()[:hex_len]: [block.block_id for block in blocks]
        for digest, blocks in copies.items()
        if len(blocks) > 1
    }
