"""What is cached, as a tree: a node is a block's worth of tokens after the prefix that its ancestors are.

Blocks are found by their hash, and proved: a hit's parent must be the very node that was matched before it, and its
tokens and extra keys those of the request. The same block text after two prefixes whose hashes collide is not enough.
So a collision costs a miss and never a wrong answer.

Among the children of a node the one that begins like the request is found as well, though it goes on differently. They
are sorted by (token, extra keys), so that the longest common beginning is that of a neighbour of the place where the
request's own tokens would be. Requests that have ended leave the beginning of a block behind: a node without a hash.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from operator import attrgetter, itemgetter

from .block import KVCacheBlock
from .block_content import BEFORE_KEYED, BEHIND_KEYED, Content, num_common_tokens, sort_bytes

# What one group has of a node: nothing, a block, or several with equal content, the oldest first.
_Copies = KVCacheBlock | dict[int, KVCacheBlock] | None


class PrefixNode:
    """`content` after what `parent` and its ancestors hold. It lives as long as it has a block or a child.

    `block_hash` is None if the content is no whole block; then there is one block in each group, and no child.
    """

    __slots__ = (
        "_sort_key",
        "block_hash",
        "content",
        "copies",
        "is_source",
        "level",
        "num_blocks",
        "num_children",
        "parent",
        "sources",
        "use",
    )

    def __init__(self, parent: PrefixNode | None, block_hash: bytes | None, content: Content, num_groups: int) -> None:
        self.parent = parent
        self.block_hash = block_hash
        self.content = content
        self.copies: list[_Copies] = [None] * num_groups
        self.num_blocks = 0
        self.num_children = 0
        # Whether requests can copy from it: filled blocks in every group.
        self.is_source = False
        # The children of which that is true, sorted if there are several.
        self.sources: list[PrefixNode] | tuple[()] = ()
        self._sort_key: tuple[bytes, int] | None = None
        # What `FrequencyOrder` knows of it; `level` is the highest that it or a child stood in.
        self.use: tuple[float, float] | None = None
        self.level = -1 << 62

    @property
    def is_live(self) -> bool:
        """Whether it is in the tree: one that has lost everything was forgotten."""
        return self.num_blocks > 0 or self.num_children > 0 or self.parent is None

    @property
    def sort_key(self) -> tuple[bytes, int]:
        if self._sort_key is None:
            self._sort_key = sort_bytes(self.content), next(_serial)
        return self._sort_key

    def block(self, group: int) -> KVCacheBlock | None:
        """The oldest of the blocks that hold this node for `group`."""
        copies = self.copies[group]
        return next(iter(copies.values())) if isinstance(copies, dict) else copies

    def filled_block(self, group: int) -> KVCacheBlock | None:
        """The oldest one that steps which have run have filled."""
        copies = self.copies[group]
        if isinstance(copies, dict):
            return next((block for block in copies.values() if block.is_filled), None)
        return copies if copies is not None and copies.is_filled else None


_by_sort_key = attrgetter("sort_key")
_by_num_common = itemgetter(1)
# Tells nodes of equal content apart.
_serial = itertools.count()


class PrefixTree:
    """The nodes of a pool whose blocks belong to one of `num_groups` KV cache groups.

    Attributes:
        root: the empty prefix.
        num_registered: how often a block was given a node, since start.
        num_held: nodes of whole blocks that have a block.
    """

    def __init__(self, num_groups: int = 1) -> None:
        self._num_groups = num_groups
        self.num_registered = 0
        self.clear()

    def clear(self) -> None:
        """Forget all nodes. Blocks that still name one are the caller's to mend."""
        self.root = PrefixNode(None, b"", b"", 0)
        self._nodes: dict[bytes, PrefixNode] = {}
        self.num_held = 0

    def walk(self, hashes: Iterable[bytes], contents: Iterable[Content]) -> list[PrefixNode]:
        """The nodes of the first blocks, up to the first that has none. Some may have lost their blocks."""
        get, node = self._nodes.get, self.root
        path = []
        for block_hash, content in zip(hashes, contents):
            child = get(block_hash)
            if child is None or child.parent is not node or child.content != content:
                break
            node = child
            path.append(node)
        return path

    def num_known(self, hashes: Sequence[bytes]) -> int:
        """How many of the first blocks have a node, by bisection: one with a child lives. Only hashes are compared."""
        nodes = self._nodes
        return bisect_left(hashes, True, key=lambda block_hash: block_hash not in nodes)

    def holds(self, block_hash: bytes) -> bool:
        """Whether some block has this hash."""
        node = self._nodes.get(block_hash)
        return node is not None and node.num_blocks > 0

    def add(
        self, parent: PrefixNode, block_hash: bytes, content: Content, blocks: Sequence[KVCacheBlock | None]
    ) -> PrefixNode | None:
        """The node of a whole block, made if there is none, which `blocks`, one for each group, will hold when the
        present step has run. They hold nothing yet. None, and nothing done, where another node has its hash.

        `parent` is live. A node that is made without any block has to be given one or a child at once.
        """
        node = self._nodes.get(block_hash)
        if node is None:
            parent.num_children += 1
            node = self._nodes[block_hash] = PrefixNode(parent, block_hash, content, self._num_groups)
        elif node.parent is not parent or node.content != content:
            return None
        for group, block in enumerate(blocks):
            if block is not None:
                self._hold(node, group, block)
        return node

    def add_partial(self, parent: PrefixNode, content: Content, blocks: Sequence[KVCacheBlock]) -> None:
        """Remember the beginning of a block: steps that have run filled `blocks`, one for each group, so far."""
        parent.num_children += 1
        node = PrefixNode(parent, None, content, self._num_groups)
        for group, block in enumerate(blocks):
            self._hold(node, group, block)
        self.fill(blocks)

    def _hold(self, node: PrefixNode, group: int, block: KVCacheBlock) -> None:
        assert block.node is None, block
        block.node, block.group = node, group
        copies = node.copies[group]
        if copies is None:
            node.copies[group] = block
        elif isinstance(copies, dict):
            copies[block.block_id] = block
        else:
            node.copies[group] = {copies.block_id: copies, block.block_id: block}
        if node.num_blocks == 0 and node.block_hash is not None:
            self.num_held += 1
        node.num_blocks += 1
        self.num_registered += 1

    def fill(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Steps that have run have written what these blocks hold: it can be copied."""
        for block in blocks:
            block.is_filled = True
            node = block.node
            assert node is not None
            if node.is_source or (self._num_groups > 1 and not self._is_filled(node)):
                continue
            parent = node.parent
            assert parent is not None
            node.is_source = True
            if parent.sources:
                insort(parent.sources, node, key=_by_sort_key)
            else:
                parent.sources = [node]

    def _is_filled(self, node: PrefixNode) -> bool:
        return all(node.filled_block(group) is not None for group in range(self._num_groups))

    def drop(self, block: KVCacheBlock) -> None:
        """`block` holds nothing any more; nor does its node, then, if it was its last block and has no child."""
        node, group = block.node, block.group
        assert node is not None
        block.node, block.is_filled = None, False
        copies = node.copies[group]
        if isinstance(copies, dict):
            del copies[block.block_id]
            if len(copies) == 1:
                [node.copies[group]] = copies.values()
        else:
            node.copies[group] = None
        node.num_blocks -= 1
        if node.is_source and node.filled_block(group) is None:
            node.is_source = False
            self._remove_source(node)
        if node.block_hash is None:
            # What is missing in one group is of no use in the others.
            for other in node.copies:
                if isinstance(other, KVCacheBlock):
                    other.node, other.is_filled = None, False
            node.num_blocks = 0
        elif node.num_blocks == 0:
            self.num_held -= 1
        self.prune(node)

    def prune(self, node: PrefixNode) -> None:
        """Forget `node` if it has neither block nor child, and so its ancestors."""
        while node.num_blocks == 0 and node.num_children == 0 and node.parent is not None:
            if node.block_hash is not None:
                del self._nodes[node.block_hash]
            node.parent.num_children -= 1
            node = node.parent

    def _remove_source(self, node: PrefixNode) -> None:
        assert node.parent is not None
        siblings = node.parent.sources
        if len(siblings) == 1:
            node.parent.sources = ()
        else:
            del siblings[bisect_left(siblings, node.sort_key, key=_by_sort_key)]  # type: ignore[union-attr]

    def longest_match(self, parent: PrefixNode, content: Content) -> tuple[PrefixNode | None, int]:
        """The child of `parent` to copy from that begins most like `content`, and how many tokens they share.

        O(log children + tokens).
        """
        siblings = parent.sources
        place = bisect_left(siblings, (sort_bytes(content),), key=_by_sort_key) if len(siblings) > 1 else 0
        best: tuple[PrefixNode | None, int] = None, 0
        for node in siblings[max(0, place - 1) : place + 1]:
            num_tokens = num_common_tokens(node.content, content)
            if num_tokens > best[1]:
                best = node, num_tokens
        return best

    def neighbours(self, parent: PrefixNode, content: Content) -> list[tuple[PrefixNode, int]]:
        """Children of `parent` to copy from, with how many tokens they share with `content`: the one that shares most,
        and, where many share as much and go on with extra keys, one that goes on without, or shares less.

        O(log children + tokens).
        """
        siblings = parent.sources
        place = bisect_left(siblings, (sort_bytes(content),), key=_by_sort_key)
        found = {node: num_common_tokens(node.content, content) for node in siblings[max(0, place - 1) : place + 1]}
        shared = sort_bytes(content, max(found.values(), default=0))
        for boundary, side in ((BEFORE_KEYED, -1), (BEHIND_KEYED, 0)):
            place = bisect_left(siblings, (shared + boundary,), key=_by_sort_key) + side
            if 0 <= place < len(siblings):
                node = siblings[place]
                found[node] = num_common_tokens(node.content, content)
        return sorted(found.items(), key=_by_num_common, reverse=True)

    def held_hashes(self) -> list[bytes]:
        """Those that some block has; O(nodes)."""
        return [block_hash for block_hash, node in self._nodes.items() if node.num_blocks > 0]

    def copies(self) -> dict[bytes, list[KVCacheBlock]]:
        """All blocks that a lookup can find by a hash, the oldest first, of all groups; O(nodes)."""
        found = {}
        for block_hash, node in self._nodes.items():
            blocks: list[KVCacheBlock] = []
            for copies in node.copies:
                if isinstance(copies, dict):
                    blocks += copies.values()
                elif copies is not None:
                    blocks.append(copies)
            if blocks:
                found[block_hash] = blocks
        return found
