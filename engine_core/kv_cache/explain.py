"""What a request would find in the prefix cache, and how its longest cached relative goes on; nothing is changed.

A relative is looked at as far as the same salts cover it and the request: how many there are under other salts, and
what they hold, decides nothing here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from engine_core.request import Request
from ipc.vocabulary import CacheExplanation, CacheProbe, MissReason

from .block import KVCacheBlock
from .block_content import (
    NOWHERE,
    Content,
    content_between,
    num_common_tokens,
    num_content_tokens,
    salts_of,
    spans_at,
    tokens_of,
)
from .miss_reason import Relative, examine_miss, find_relative, may_hear_of
from .prefix_hit import PrefixHit, Tail
from .prefix_tree import PrefixNode, PrefixTree
from .token_bytes import token_ids_of

if TYPE_CHECKING:
    from .manager import KVCacheManager

# So many of a relative's tokens behind the place where it goes on differently, where no more are wanted.
NUM_TOKENS_AFTER = 24
# Enough for any tools a chat may bring; a bound for what one answer holds.
MAX_TOKENS_AFTER = 1 << 14
# Under one node there may be thousands, of as many salts.
_MAX_CHILDREN = 64


def probe_cache(kv: KVCacheManager, request: Request) -> CacheProbe:
    """What `request`, which has not been added, would find now."""
    hit = kv.get_computed_blocks(request)
    return _probe_of(kv, hit, examine_miss(kv, request, hit).reason)


def explain_cache(kv: KVCacheManager, request: Request, relative_end: int) -> CacheProbe:
    """The same with its explanation, which shows the relative's tokens up to `relative_end`, or a few if those are
    fewer. O(blocks + tokens shown).
    """
    hit = kv.get_computed_blocks(request)
    miss = examine_miss(kv, request, hit, _find_closest)
    kind, tokens = None, list[int]()
    if miss.relative is not None:
        start = hit.num_whole_blocks * kv.block_size
        kind = _kind_of_difference(_own_content(request, start, kv.block_size), miss.relative)
        num_tokens = min(max(NUM_TOKENS_AFTER, relative_end - miss.token_index), MAX_TOKENS_AFTER)
        tokens = list(itertools.islice(_tokens_after(request, miss.relative, start, kv.block_size), num_tokens))
    explanation = CacheExplanation(
        token_index=miss.token_index,
        relative_token_ids=tokens,
        differing_kind=kind,
        lost_since_s=None if miss.loss is None else miss.loss.since_s,
    )
    return _probe_of(kv, hit, miss.reason, explanation)


def _probe_of(
    kv: KVCacheManager, hit: PrefixHit, reason: MissReason, explanation: CacheExplanation | None = None
) -> CacheProbe:
    kept = itertools.takewhile(_is_kept, zip(*hit.blocks, strict=True))
    return CacheProbe(
        num_hit_tokens=hit.num_tokens,
        num_copied_tokens=hit.num_copied_tokens,
        num_kept_tokens=min(sum(1 for _ in kept) * kv.block_size, hit.num_tokens),
        tier_tokens={"device": hit.num_tokens},
        miss_reason=reason,
        explanation=explanation,
    )


def _is_kept(blocks: Sequence[KVCacheBlock | None]) -> bool:
    """Of one depth, one for each group. What no token to come sees need not be."""
    return all(block is None or block.keep is not None for block in blocks)


def _find_closest(tree: PrefixTree, parent: PrefixNode, own: Content, tail: Tail | None) -> Relative | None:
    """As `find_relative`; but of several that share equally much the one whose tokens do."""
    best = find_relative(tree, parent, own, tail)
    most = (0, -1) if best is None else (best.num_common, _num_equal_tokens(own, best.content))
    for node in itertools.islice(parent.sources, _MAX_CHILDREN):
        num_common = num_common_tokens(node.content, own)
        if num_common < most[0] or not may_hear_of(own, node.content, num_common):
            continue
        equal = num_common, _num_equal_tokens(own, node.content)
        if equal > most:
            best, most = Relative(node.content, node, num_common), equal
    return best


def _num_equal_tokens(one: Content, other: Content) -> int:
    """Whatever extra keys they have."""
    return num_common_tokens(tokens_of(one), tokens_of(other))


def _own_content(request: Request, start: int, block_size: int) -> Content:
    """Of the request's block at `start`, as far as it has one."""
    end = min(start + block_size, request.num_tokens)
    if start >= end:
        return b""
    return content_between(request, start, end, block_size)


def _kind_of_difference(own: Content, relative: Relative) -> str | None:
    """The kind of extra key that sets them apart, where the tokens do not."""
    place = relative.num_common
    if place >= min(num_content_tokens(own), _num_equal_tokens(own, relative.content)):
        return None
    differing = set(spans_at(own, place)) ^ set(spans_at(relative.content, place))
    return min((span.kind for span in differing), default=None)


def _tokens_after(request: Request, relative: Relative, start: int, block_size: int) -> Iterator[int]:
    """How the relative goes on behind what it shares with the request, as far as the request may hear of it and it is
    cached. Where it goes on in several ways, in one of them. Its first block begins at token `start`.
    """
    content, node, first = relative.content, relative.node, relative.num_common
    while True:
        own = _own_content(request, start, block_size)
        end = min(num_content_tokens(content), _end_of_equal_salts(own, content))
        yield from token_ids_of(tokens_of(content))[first:end]
        if end < block_size or node is None:
            return
        start, first = start + block_size, 0
        own = _own_content(request, start, block_size)
        children = itertools.islice(node.sources, _MAX_CHILDREN)
        following = next((child for child in children if _end_of_equal_salts(own, child.content) > 0), None)
        if following is None:
            return
        content, node = following.content, following


def _end_of_equal_salts(own: Content, relative: Content) -> int:
    """The first token that is not covered by the same salts on both sides."""
    differing = {(span.start, span.keys) for span in salts_of(own)} ^ {
        (span.start, span.keys) for span in salts_of(relative)
    }
    return min((max(0, start) for start, _ in differing), default=NOWHERE)
