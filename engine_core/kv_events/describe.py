"""Changes of the prefix cache as the events that others read."""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from engine_core.config import KVEventHashes
from engine_core.kv_cache.block_content import Content, KeyedContent, KeySpan
from engine_core.kv_cache.prefix_tree import PrefixNode
from ipc.kv_events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVEvent
from ipc.vocabulary import ExtraKeySpan

from .recorder import CacheChange

# What a consumer takes for the engine's own memory, whatever the device: other names stand for places farther away.
MEDIUM = "GPU"
_HASH_NUMBER_BYTES = 8
_MAX_LABELS = 4096


class EventDescriber:
    """Turns changes into events: those of blocks that follow each other, in one step and group, into one event.

    Args:
        block_size: tokens of a block.
        windows: of each KV cache group, as in `ModelInfo.windows`. With one group that sees all, events name none.
        hashes: how blocks are called.
    """

    def __init__(self, block_size: int, windows: Sequence[int | None], hashes: KVEventHashes = "int") -> None:
        self._block_size = block_size
        self._windows = windows
        self._names_groups = tuple(windows) != (None,)
        self._hashes = hashes
        self._labels: OrderedDict[str | bytes, str] = OrderedDict()

    def learn_labels(self, spans: Iterable[ExtraKeySpan]) -> None:
        """Remember what people call the adapters in `spans`, the last 4,096. Nodes know them by their keys alone."""
        for span in spans:
            if span.kind == "lora" and self._labels.get(span.key) != span.label:
                self._labels[span.key] = span.label
                if len(self._labels) > _MAX_LABELS:
                    self._labels.popitem(last=False)

    def events(self, changes: Iterable[CacheChange]) -> list[KVEvent]:
        """What to tell of `changes`, in their order. Any thread may ask, one at a time."""
        events: list[KVEvent] = []
        for what, group, nodes in changes:
            if what == "cleared":
                events.append(AllBlocksCleared())
            elif what == "removed":
                hashes = [self._name(node.block_hash) for node in nodes]
                events.append(BlockRemoved(hashes, MEDIUM, group if self._names_groups else None))
            else:
                events += [self._stored(group, chain) for chain in _chains(nodes)]
        return events

    def _name(self, block_hash: bytes | None) -> BlockHash:
        assert block_hash is not None
        if self._hashes == "bytes":
            return block_hash
        return int.from_bytes(block_hash[-_HASH_NUMBER_BYTES:], "big")

    def _stored(self, group: int, chain: Sequence[PrefixNode]) -> BlockStored:
        parent = chain[0].parent
        assert parent is not None
        has_parent = parent.parent is not None
        keys = [self._extra_keys(node.content) for node in chain]
        lora_key = _lora_key(chain[0].content)
        window = self._windows[group]
        kind = "full_attention" if window is None else "sliding_window"
        return BlockStored(
            block_hashes=[self._name(node.block_hash) for node in chain],
            parent_block_hash=self._name(parent.block_hash) if has_parent else None,
            token_ids=_token_ids(chain),
            block_size=self._block_size,
            lora_id=None,
            medium=MEDIUM,
            lora_name=None if lora_key is None else self._label(lora_key),
            extra_keys=keys if any(keys) else None,
            group_idx=group if self._names_groups else None,
            kv_cache_spec_kind=kind if self._names_groups else None,
            kv_cache_spec_sliding_window=window,
        )

    def _label(self, key: str | bytes) -> str:
        return self._labels.get(key) or (key if isinstance(key, str) else key.hex())

    def _extra_keys(self, content: Content) -> tuple[Any, ...] | None:
        if not isinstance(content, KeyedContent):
            return None
        return tuple(key for span in content.spans for key in self._untagged(span))

    def _untagged(self, span: KeySpan) -> list[Any]:
        """As the peer has them, without their kinds; what it does not know, with kind and place."""
        if span.kind == "lora":
            return [self._label(key) for key in span.keys]
        if span.kind == "mm":
            return [(key, span.start) for key in span.keys]
        if span.kind == "prompt_embeds" or (span.kind == "cache_salt" and span.start <= 0):
            return list(span.keys)
        return [(span.kind, key, span.start, span.end) for key in span.keys]


def _chains(nodes: Sequence[PrefixNode]) -> Iterator[list[PrefixNode]]:
    """Nodes that follow each other, each the child of the one before it, of one adapter."""
    chain: list[PrefixNode] = []
    for node in nodes:
        if chain and (node.parent is not chain[-1] or _lora_key(node.content) != _lora_key(chain[0].content)):
            yield chain
            chain = []
        chain.append(node)
    if chain:
        yield chain


def _lora_key(content: Content) -> str | bytes | None:
    if not isinstance(content, KeyedContent):
        return None
    return next((span.keys[0] for span in content.spans if span.kind == "lora"), None)


def _token_ids(chain: Sequence[PrefixNode]) -> list[int]:
    contents = [node.content for node in chain]
    ids = array("I", b"".join(part if isinstance(part, bytes) else part.tokens for part in contents))
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()
