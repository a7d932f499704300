"""Why the prefix cache did no more for a request: told from what the lookup has seen, at little more cost.

What is told of relatives is what the request's own salts let it find: what goes on under other salts does not exist
for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from engine_core.request import Request
from ipc.vocabulary import MissReason

from .block_content import Content, content_between, num_content_tokens, salts_before
from .lost_blocks import Loss
from .prefix_hit import PrefixHit, Tail
from .prefix_tree import PrefixNode, PrefixTree

if TYPE_CHECKING:
    from .manager import KVCacheManager


class Relative(NamedTuple):
    """What is cached behind the whole blocks that a request found, and begins with `num_common` tokens of it.

    `node` is None for what a running request has not filled yet.
    """

    content: Content
    node: PrefixNode | None
    num_common: int


class Miss(NamedTuple):
    """Why a hit was no longer, and the first token of the request that something is to be said about: it was lost, or
    the relative goes on differently.
    """

    reason: MissReason
    token_index: int
    relative: Relative | None = None
    loss: Loss | None = None


FindRelative = Callable[[PrefixTree, PrefixNode, Content, Tail | None], Relative | None]


def find_relative(tree: PrefixTree, parent: PrefixNode, own: Content, tail: Tail | None) -> Relative | None:
    """What was copied from, or the child of `parent` that begins most like `own`, if its sender may hear of it."""
    if tail is not None and may_hear_of(own, tail.content, tail.num_slots):
        return relative_of_tail(tail)
    for node, num_common in tree.neighbours(parent, own):
        if may_hear_of(own, node.content, num_common):
            return Relative(node.content, node, num_common)
    return None


def relative_of_tail(tail: Tail) -> Relative:
    node = tail.blocks[0].node if tail.blocks[0].is_filled else None
    return Relative(tail.content, node, tail.num_slots)


def may_hear_of(own: Content, relative: Content, num_common: int) -> bool:
    """Whether the sender of `own` may know of a relative that shares so many tokens, and how it goes on: the same salts
    cover both up to there.
    """
    return salts_before(own, num_common + 1) == salts_before(relative, num_common + 1)


def examine_miss(kv: KVCacheManager, request: Request, hit: PrefixHit, find: FindRelative = find_relative) -> Miss:
    """Why `hit`, just found for all tokens of `request` and not allocated yet, is no longer.

    O(log children + block size), with the default for `find`. Only whole blocks are known to be lost, as long as they
    are remembered (`LostBlocks`).
    """
    if not kv.enable_caching:
        return Miss("cache_disabled", 0)
    if not request.read_prefix_cache:
        return Miss("read_disabled", 0)
    most = kv.most_hit_tokens(request)
    if hit.num_tokens >= most:
        return Miss("none", hit.num_tokens)
    tree, num_whole, size = kv.pool.tree, hit.num_whole_blocks, kv.block_size
    if num_whole < len(request.block_hashes):
        next_hash = request.block_hashes[num_whole]
        loss = kv.pool.lost.find(next_hash)
        if tree.num_known((next_hash,)):
            # A node without the blocks it once had, as its descendants show. Or those of a window were never kept.
            was_kept = kv.window_retention == "all" or kv.windows == (None,)
            return Miss("evicted" if was_kept else "continued", hit.num_tokens, loss=loss)
        if loss is not None:
            return Miss(loss.why, hit.num_tokens, loss=loss)
    start = num_whole * size
    end = min(start + size, request.num_tokens)
    own = content_between(request, start, end, size)
    relative = find(tree, hit.nodes[-1] if num_whole else tree.root, own, hit.tail)
    # What was copied may have come from where a foreign salt begins behind it; who may be heard of has less in common.
    if relative is None or start + relative.num_common < max(1, hit.num_tokens):
        return Miss("continued" if hit.num_tokens else "not_found", hit.num_tokens)
    place = start + relative.num_common
    if place >= most:
        reason: MissReason = "block_boundary"
    elif relative.num_common == num_content_tokens(relative.content):
        reason = "continued" if place <= hit.num_tokens else "block_boundary"
    else:
        reason = "diverged"
    return Miss(reason, place, relative)
