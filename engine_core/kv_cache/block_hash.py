"""A block's identity: `hash(parent, token ids, extra keys)`.

Two layouts of the hashed bytes.

**Foreword's own** (`sha256`; `xxhash` is XXH3-128 of the same bytes). All integers little-endian:

    parent        the previous block's hash, or the root: 32 bytes (xxhash: 16)
    u32           number of tokens, then one u32 per token id
    u32           number of extra keys, then for each, in the order of `spans.hashing_order`:
      u16 + UTF-8   kind
      u8            0: the key is text, 1: the key is bytes
      u32 + bytes   key (text as UTF-8)
      i64 i64       start and end of its span relative to the block's first token; the end is cut at the block's end

Every part is counted or of fixed length, so no two different blocks have equal bytes. The root is
`H("foreword kv block v1" ‖ 0 ‖ cache namespace)`: chains of different models never meet.

**vLLM's** (`sha256_cbor`, `xxhash_cbor`), byte for byte, so that routers made for its KV events can read ours:
canonical CBOR of `(parent, (token ids…), extra keys | None)`, with these tagged keys in this order:

    kind lora            ("lora", label, key)
    kind mm              ("mm", key, start relative to the block)
    kind cache_salt      ("cache_salt", key), if its span starts with the block or before
    kind prompt_embeds   ("prompt_embeds", key)
    any other            (kind, key, relative start, relative end)

Its root is H(cbor(seed)).
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Protocol

import cbor2
import xxhash

from engine_core.config import HashAlgo
from engine_core.errors import InvalidConfigError
from engine_core.request import Request
from ipc.vocabulary import ExtraKeySpan

from .block_content import block_contents
from .spans import spans_by_block
from .token_bytes import cbor_token_bytes, own_token_bytes

logger = logging.getLogger(__name__)

_ROOT_TAG = b"foreword kv block v1\0"


def _cbor(value: object) -> bytes:
    return cbor2.dumps(value, canonical=True)


class _Hash(Protocol):
    def digest(self) -> bytes: ...


_HASHES: dict[HashAlgo, Callable[[bytes], _Hash]] = {
    "sha256": hashlib.sha256,
    "sha256_cbor": hashlib.sha256,
    "xxhash": xxhash.xxh3_128,
    "xxhash_cbor": xxhash.xxh3_128,
}


def _relative_end(span: ExtraKeySpan, start: int, end: int) -> int:
    return (end if span.end is None else min(span.end, end)) - start


def encode_extra_keys(spans: Sequence[ExtraKeySpan], start: int, end: int) -> bytes:
    """The extra keys of the block at `[start, end)`, in Foreword's own layout. `spans` overlap it, in order."""
    parts = [struct.pack("<I", len(spans))]
    for span in spans:
        kind = span.kind.encode()
        key = span.key.encode() if isinstance(span.key, str) else span.key
        parts.append(struct.pack(f"<H{len(kind)}sBI", len(kind), kind, isinstance(span.key, bytes), len(key)))
        parts.append(key)
        parts.append(struct.pack("<qq", span.start - start, _relative_end(span, start, end)))
    return b"".join(parts)


def tagged_extra_keys(spans: Sequence[ExtraKeySpan], start: int, end: int) -> tuple[tuple[object, ...], ...] | None:
    """The same keys as vLLM tags them. None where there are none."""
    if not spans:
        return None
    tagged: list[tuple[object, ...]] = []
    for span in spans:
        match span.kind:
            case "lora":
                tagged.append(("lora", span.label, span.key))
            case "mm":
                tagged.append(("mm", span.key, span.start - start))
            case "prompt_embeds":
                tagged.append((span.kind, span.key))
            case "cache_salt" if span.start <= start:
                tagged.append((span.kind, span.key))
            case _:
                tagged.append((span.kind, span.key, span.start - start, _relative_end(span, start, end)))
    return tuple(tagged)


def encode_tagged_extra_keys(spans: Sequence[ExtraKeySpan], start: int, end: int) -> bytes:
    """`tagged_extra_keys` as canonical CBOR."""
    return _cbor(tagged_extra_keys(spans, start, end))


class BlockHasher:
    """Hashes blocks of `block_size` tokens with one algorithm and one root.

    Args:
        algo: one of `HashAlgo`.
        seed: root of the chains in the `_cbor` modes (`PYTHONHASHSEED`, if set, goes before it) and of `xxhash`.
        namespace: the cache namespace; the root in our own modes, and the seed where the `_cbor` modes are given none.

    The xxhash modes are not collision resistant, so without a seed their root is random per process.
    """

    def __init__(self, algo: HashAlgo, block_size: int, *, seed: str | None = None, namespace: str = "") -> None:
        if algo not in _HASHES:
            raise InvalidConfigError(f"prefix_caching_hash_algo: {algo!r} is none of {', '.join(_HASHES)}")
        self.algo: HashAlgo = algo
        self.block_size = block_size
        self._hash = _HASHES[algo]
        is_cbor = algo.endswith("_cbor")
        if is_cbor:
            seed = os.environ.get("PYTHONHASHSEED", seed)
        if algo.startswith("xxhash"):
            logger.warning("hash_not_cryptographic algo=%s risk=%r", algo, "crafted prompts can hit a stranger's cache")
            if seed is None:
                seed = os.urandom(32).hex()
        # The hashed bytes are before_parent ‖ parent ‖ tokens ‖ extra keys.
        if is_cbor:
            self.root = self._hash(_cbor(namespace if seed is None else seed)).digest()
            self._before_parent = _cbor((self.root, None, None)).partition(self.root)[0]
            self._token_bytes = cbor_token_bytes
            self._encode_extra_keys = encode_tagged_extra_keys
        else:
            seeded = namespace if seed is None else f"{namespace}\0{seed}"
            self.root = self._hash(_ROOT_TAG + seeded.encode()).digest()
            self._before_parent = b""
            self._token_bytes = own_token_bytes
            self._encode_extra_keys = encode_extra_keys
        self._no_extra_keys = self._encode_extra_keys((), 0, block_size)

    def extend(self, request: Request) -> None:
        """Append the hashes and contents of the request's full blocks that have none yet.

        Raises:
            OverflowError: a token id is not within [0, 2^32).
        """
        block_size = self.block_size
        first, end = len(request.block_hashes), request.num_tokens // block_size
        if first == end:
            return
        token_ids, spans = request.token_ids[first * block_size : end * block_size], request.extra_key_spans
        parent = request.block_hashes[-1] if first else self.root
        request.block_contents += block_contents(token_ids, spans, first, block_size)
        request.block_hashes += self.hash_blocks(token_ids, spans, first, parent)

    def hash_blocks(
        self, token_ids: Sequence[int], spans: Sequence[ExtraKeySpan], first: int, parent: bytes
    ) -> list[bytes]:
        """The hashes of the whole blocks that `token_ids` fill, of which the first is block `first`, after `parent`.

        Raises:
            OverflowError: in our own modes, a token id is not within [0, 2^32).
        """
        blocks = self._token_bytes(token_ids, self.block_size)
        extra_keys: Iterable[bytes] = repeat(self._no_extra_keys)
        if spans:
            extra_keys = self._extra_keys(spans, first, len(blocks))
        new_hash, before_parent = self._hash, self._before_parent
        hashes = []
        for tokens, keys in zip(blocks, extra_keys):
            parent = new_hash(before_parent + parent + tokens + keys).digest()
            hashes.append(parent)
        return hashes

    def _extra_keys(self, spans: Sequence[ExtraKeySpan], first: int, num_blocks: int) -> Iterator[bytes]:
        starts = range(first * self.block_size, (first + num_blocks) * self.block_size, self.block_size)
        for start, overlapping in zip(starts, spans_by_block(spans, first, num_blocks, self.block_size)):
            yield self._encode_extra_keys(overlapping, start, start + self.block_size)
