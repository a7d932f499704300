"""The prefix tree: what lives how long, what proves a hit, and whose beginning is found."""

from __future__ import annotations

import random

from engine_core.kv_cache import KVCacheBlock
from engine_core.kv_cache import prefix_tree as prefix_tree_module
from engine_core.kv_cache.prefix_tree import PrefixNode, PrefixTree
from engine_core.kv_cache.token_bytes import token_id_bytes


def tokens(*ids: int) -> bytes:
    return token_id_bytes(ids)


def add(tree: PrefixTree, parent: PrefixNode, name: bytes, block_id: int, content: bytes | None = None) -> PrefixNode:
    block = KVCacheBlock(block_id)
    node = tree.add(parent, name, tokens(*name) if content is None else content, [block])
    assert node is not None
    tree.fill([block])
    return node


def path(tree: PrefixTree, *names: bytes) -> list[PrefixNode]:
    return tree.walk(names, [tokens(*name) for name in names])


def drop(tree: PrefixTree, node: PrefixNode) -> None:
    block = node.block(0)
    assert block is not None
    tree.drop(block)


def test_a_hit_has_the_parent_that_was_matched_before_it():
    """The same block text after two different prefixes, with the same hash."""
    tree = PrefixTree()
    first = add(tree, tree.root, b"first", 0)
    below = add(tree, first, b"below", 1)
    assert path(tree, b"first", b"below") == [first, below]
    second = add(tree, tree.root, b"second", 2)
    assert path(tree, b"second", b"below") == [second]
    assert tree.add(second, b"below", tokens(*b"below"), [KVCacheBlock(3)]) is None


def test_a_hit_has_the_tokens_of_the_request():
    tree = PrefixTree()
    node = add(tree, tree.root, b"hash", 0)
    assert tree.walk([b"hash"], [node.content]) == [node]
    assert tree.walk([b"hash"], [b"other"]) == []


def test_a_parent_that_comes_back_finds_its_children_again():
    tree = PrefixTree()
    parent = add(tree, tree.root, b"parent", 0)
    child = add(tree, parent, b"child", 1)
    drop(tree, parent)
    assert path(tree, b"parent", b"child") == [parent, child] and parent.block(0) is None
    assert not tree.holds(b"parent") and tree.holds(b"child")
    assert add(tree, tree.root, b"parent", 2) is parent
    assert [node.block(0) is not None for node in path(tree, b"parent", b"child")] == [True, True]


def test_what_has_neither_block_nor_child_is_forgotten_with_all_that_led_to_it():
    tree = PrefixTree()
    parent = add(tree, tree.root, b"parent", 0)
    child = add(tree, parent, b"child", 1)
    drop(tree, parent)
    assert parent.is_live
    drop(tree, child)
    assert not parent.is_live and not child.is_live
    assert (tree.copies(), tree.num_held, tree.root.num_children, tree.root.sources) == ({}, 0, 0, ())


def test_a_copy_is_made_from_a_block_that_is_filled():
    tree = PrefixTree()
    block = KVCacheBlock(0)
    node = tree.add(tree.root, b"abcd", tokens(*b"abcd"), [block])
    assert tree.longest_match(tree.root, tokens(*b"abx")) == (None, 0), "its step has not run"
    tree.fill([block])
    assert tree.longest_match(tree.root, tokens(*b"abx")) == (node, 2)
    # Of two blocks of one node the filled one, though it is younger.
    second = KVCacheBlock(1)
    tree.drop(block)
    unfilled = KVCacheBlock(2)
    assert tree.add(tree.root, b"abcd", tokens(*b"abcd"), [unfilled]) is not None
    assert (again := tree.add(tree.root, b"abcd", tokens(*b"abcd"), [second])) is not None
    tree.fill([second])
    assert (again.block(0), again.filled_block(0)) == (unfilled, second)
    assert tree.longest_match(tree.root, tokens(*b"ab")) == (again, 2)
    tree.drop(second)
    assert tree.longest_match(tree.root, tokens(*b"ab")) == (None, 0)


def test_a_copy_needs_a_block_in_every_group():
    tree = PrefixTree(num_groups=2)
    full, windowed = KVCacheBlock(0), KVCacheBlock(1)
    node = tree.add(tree.root, b"abcd", tokens(*b"abcd"), [full, None])
    tree.fill([full])
    assert tree.longest_match(tree.root, tokens(*b"ab")) == (None, 0)
    assert tree.add(tree.root, b"abcd", tokens(*b"abcd"), [None, windowed]) is node
    tree.fill([windowed])
    assert tree.longest_match(tree.root, tokens(*b"ab")) == (node, 2)
    tree.drop(full)
    assert tree.longest_match(tree.root, tokens(*b"ab")) == (None, 0)


def test_a_beginning_is_found_until_its_block_is_taken():
    tree = PrefixTree(num_groups=2)
    blocks = [KVCacheBlock(0), KVCacheBlock(1)]
    tree.add_partial(tree.root, tokens(1, 2, 3), blocks)
    node, num_tokens = tree.longest_match(tree.root, tokens(1, 2, 9))
    assert node is not None and num_tokens == 2 and node.block_hash is None
    assert (tree.num_held, tree.copies()) == (0, {}), "no lookup by a hash finds it"
    tree.drop(blocks[1])
    assert tree.longest_match(tree.root, tokens(1, 2, 9)) == (None, 0)
    assert blocks[0].node is None, "what is missing in one group is of no use in the others"
    assert tree.root.num_children == 0


def test_the_longest_beginning_is_found_among_all_children():
    tree, rng = PrefixTree(), random.Random(0)
    texts = [[rng.randrange(3) for _ in range(6)] for _ in range(300)]
    blocks = []
    for index, text in enumerate(texts):
        blocks.append(KVCacheBlock(index))
        tree.add_partial(tree.root, tokens(*text), [blocks[-1]])
    for _ in range(400):
        wanted = [rng.randrange(3) for _ in range(rng.randrange(1, 7))]
        expected = max(
            (sum(all(a == b for a, b in zip(text[:k], wanted[:k])) for k in range(1, len(wanted) + 1)))
            for text, block in zip(texts, blocks)
            if block.node is not None
        )
        assert tree.longest_match(tree.root, tokens(*wanted))[1] == expected
        if len(blocks) > 100 and (victim := rng.choice(blocks)).node is not None:
            tree.drop(victim)
    for block in blocks:
        if block.node is not None:
            tree.drop(block)
    assert tree.root.num_children == 0 and tree.root.sources == ()


def test_ten_thousand_children_cost_two_comparisons(monkeypatch):
    tree, rng = PrefixTree(), random.Random(1)
    for index in range(10_000):
        tree.add_partial(tree.root, tokens(*(rng.randrange(50_000) for _ in range(8))), [KVCacheBlock(index)])
    compared = []
    compare = prefix_tree_module.num_common_tokens
    monkeypatch.setattr(
        prefix_tree_module, "num_common_tokens", lambda one, other: compared.append(one) or compare(one, other)
    )
    tree.longest_match(tree.root, tokens(7, 8, 9))
    assert len(compared) <= 2
