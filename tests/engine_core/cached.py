"""Putting blocks into a pool's prefix tree by hand, and finding them again."""

from __future__ import annotations

from collections.abc import Sequence

from engine_core.kv_cache import BlockPool, KVCacheBlock
from engine_core.kv_cache.token_bytes import TOKEN_BYTES
from engine_core.request import Request


def _content(name: bytes) -> bytes:
    """Whole tokens that begin with `name`."""
    return name + bytes(-len(name) % TOKEN_BYTES)


def cache_apart(pool: BlockPool, blocks: Sequence[KVCacheBlock], names: Sequence[bytes]) -> None:
    """Each block as the first one of a prefix of its own."""
    for block, name in zip(blocks, names, strict=True):
        assert pool.tree.add(pool.tree.root, name, _content(name), [block]) is not None
    pool.tree.fill(blocks)


def cached_apart(pool: BlockPool, names: Sequence[bytes]) -> list[KVCacheBlock]:
    """The blocks that `cache_apart` put there, up to the first that is gone."""
    found: list[KVCacheBlock] = []
    for name in names:
        path = pool.tree.walk([name], [_content(name)])
        if not path:
            break
        block = path[0].block(0)
        assert block is not None
        found.append(block)
    return found


def cache_chain(pool: BlockPool, blocks: Sequence[KVCacheBlock], request: Request) -> None:
    """The first blocks of `request`, which is hashed."""
    parent = pool.tree.root
    for block, block_hash, content in zip(blocks, request.block_hashes, request.block_contents):
        node = pool.tree.add(parent, block_hash, content, [block])
        assert node is not None
        parent = node
    pool.tree.fill(blocks)


def cached_chain(pool: BlockPool, request: Request) -> list[KVCacheBlock]:
    """The cached first blocks of `request`, which is hashed."""
    found = []
    for node in pool.tree.walk(request.block_hashes, request.block_contents):
        block = node.block(0)
        if block is None:
            break
        found.append(block)
    return found
