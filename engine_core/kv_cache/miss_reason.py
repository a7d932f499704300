"""Why the prefix cache did no more for a request: told from what the lookup has seen, at little more cost.

What is told of relatives is what the request's own salt lets it find: children of a node under other salts do not
exist for it.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from engine_core.request import Request
from ipc.messages import MissReason

from .block_content import Content, num_content_tokens, partial_content, salts_before
from .prefix_hit import PrefixHit
from .prefix_tree import PrefixNode

if TYPE_CHECKING:
    from .manager import KVCacheManager

# Where children under other salts are many, one that may be told of can be missed: then the request `continued`.
_MAX_LOOKED_AT = 64


def why_missed(kv: KVCacheManager, request: Request, hit: PrefixHit) -> MissReason:
    """Why `hit`, just found for all tokens of `request`, is no longer.

    O(log children + block size). Blocks count as lost if they were so lately (`LostBlocks`), and only whole ones.
    """
    if not kv.enable_caching:
        return "cache_disabled"
    if not request.read_prefix_cache:
        return "read_disabled"
    if hit.num_tokens >= kv.most_hit_tokens(request):
        return "none"
    num_whole = hit.num_whole_blocks
    if num_whole < len(request.block_hashes):
        if kv.pool.tree.num_known(request.block_hashes[num_whole : num_whole + 1]):
            # A node without the blocks it once had, as its descendants show. Or those of a window were never kept.
            return "evicted" if kv.window_retention == "all" or kv.windows == (None,) else "continued"
        if (loss := kv.pool.lost.find(request.block_hashes[num_whole])) is not None:
            return loss.why
    return _what_relatives_have(kv, request, hit)


def _what_relatives_have(kv: KVCacheManager, request: Request, hit: PrefixHit) -> MissReason:
    num_whole, size = hit.num_whole_blocks, kv.block_size
    start = num_whole * size
    parent = hit.nodes[-1] if num_whole else kv.pool.tree.root
    own = partial_content(
        request.token_ids, request.extra_key_spans, start, min(start + size, request.num_tokens), size
    )
    relative, num_common = None if hit.tail is None else hit.tail.content, hit.num_copied_tokens
    if relative is None or not may_hear_of(own, relative, num_common):
        relative, num_common = closest_relative(kv, parent, own, _MAX_LOOKED_AT)
    if relative is not None and start + num_common > 0:
        if start + num_common >= kv.most_hit_tokens(request):
            return "block_boundary"
        if num_common == num_content_tokens(relative):
            return "continued" if start + num_common <= hit.num_tokens else "block_boundary"
        return "diverged"
    return "continued" if hit.num_tokens else "not_found"


def closest_relative(
    kv: KVCacheManager, parent: PrefixNode, own: Content, max_looked_at: int
) -> tuple[Content | None, int]:
    """The child of `parent` that begins most like `own`, of those that its sender may hear of, and how many tokens they
    share. Of `max_looked_at` children that begin most like it.
    """
    for node, num_common in itertools.islice(kv.pool.tree.alike(parent, own), max_looked_at):
        if may_hear_of(own, node.content, num_common):
            return node.content, num_common
    return None, 0


def may_hear_of(own: Content, relative: Content, num_common: int) -> bool:
    """Whether the sender of `own` may know of a relative that shares so many tokens, and how it goes on: the same salts
    cover both up to there.
    """
    return salts_before(own, num_common + 1) == salts_before(relative, num_common + 1)
