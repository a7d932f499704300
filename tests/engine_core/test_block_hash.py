"""Block identity: the peer's vectors byte for byte, and what Foreword's own layout must tell apart."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import random
import struct
from pathlib import Path

import cbor2
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.errors import InvalidConfigError
from engine_core.kv_cache.block_hash import BlockHasher, spans_by_block, tagged_extra_keys
from ipc.vocabulary import ExtraKeySpan
from tests.engine_core.make import make_request

VECTORS = json.loads(gzip.decompress((Path(__file__).parent.parent / "data/oracle/hash_vectors.json.gz").read_bytes()))
OWN_ALGOS = ["sha256", "xxhash"]
ALGOS = [*OWN_ALGOS, "sha256_cbor", "xxhash_cbor"]


def case_spans(case: dict) -> tuple[ExtraKeySpan, ...]:
    """The spans a frontend would send for a case of the vectors."""
    spans = []
    if case["lora"]:
        spans.append(ExtraKeySpan(0, None, "lora", case["lora"]["path"], label=case["lora"]["name"]))
    for feature in case["mm_features"]:
        start = feature["offset"]
        spans.append(ExtraKeySpan(start, start + feature["length"], "mm", feature["identifier"]))
    if case["cache_salt"]:
        spans.append(ExtraKeySpan(0, 1, "cache_salt", case["cache_salt"]))
    if embeds := case.get("prompt_embeds"):
        import numpy as np

        rows = np.array(embeds["rows"], dtype=embeds["dtype"])
        size = case["block_size"]
        for start in range(0, len(rows), size):
            digest = hashlib.sha256(rows[start : start + size].tobytes()).digest()
            spans.append(ExtraKeySpan(start, min(start + size, len(rows)), "prompt_embeds", digest))
    return tuple(spans)


def hashes_of(hasher: BlockHasher, token_ids: list[int], spans: tuple[ExtraKeySpan, ...] = ()) -> list[bytes]:
    num_whole = len(token_ids) // hasher.block_size * hasher.block_size
    return hasher.hash_blocks(token_ids[:num_whole], spans, 0, hasher.root)


def test_there_are_as_many_vectors_as_were_published():
    assert len(VECTORS["cases"]) == 74
    assert sum(case["num_full_blocks"] for case in VECTORS["cases"]) == 269


@pytest.mark.parametrize("algo", ["sha256_cbor", "xxhash_cbor"])
@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: case["name"])
def test_cbor_modes_equal_the_peer_byte_for_byte(case: dict, algo: str, monkeypatch: pytest.MonkeyPatch):
    expected = case["expected_block_hashes_hex"][algo]
    if expected is None:
        pytest.skip("the peer draws a random root here, so there is nothing to compare with")
    seed = None
    if case["root_seed"] is None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        seed = "vllm-none-hash"  # the peer's default
    else:
        monkeypatch.setenv("PYTHONHASHSEED", case["root_seed"])
    hasher = BlockHasher(algo, case["block_size"], seed=seed, namespace="not used")
    spans = case_spans(case)
    random.Random(case["name"]).shuffle(shuffled := list(spans))
    whole = hashes_of(hasher, case["prompt_token_ids"] + case["output_token_ids"], tuple(shuffled))
    assert [block_hash.hex() for block_hash in whole] == expected

    tags = [
        tagged_extra_keys(overlapping, index * case["block_size"], (index + 1) * case["block_size"])
        for index, overlapping in enumerate(spans_by_block(spans, 0, case["num_full_blocks"], case["block_size"]))
    ]
    shown = [
        keys and [[{"bytes_hex": part.hex()} if isinstance(part, bytes) else part for part in key] for key in keys]
        for keys in tags
    ]
    assert shown == case["expected_extra_keys_per_block"]

    tokens, size, stepwise = case["prompt_token_ids"] + case["output_token_ids"], case["block_size"], []
    for index in range(len(whole)):
        parent = stepwise[-1] if stepwise else hasher.root
        stepwise += hasher.hash_blocks(tokens[index * size : (index + 1) * size], spans, index, parent)
    assert stepwise == whole


@given(
    st.lists(st.sampled_from([23, 24, 255, 256, 65535, 65536, 2**32 - 1]) | st.integers(0, 2**32 - 1), min_size=1),
    st.lists(st.integers(-(2**70), 2**70), max_size=1),
    st.sampled_from([1, 2, 16]) | st.integers(1, 300),
    st.sampled_from([1, 2, 11, 12, 40]),
    st.sampled_from(["sha256_cbor", "xxhash_cbor"]),
)
@settings(deadline=None)
def test_cbor_modes_hash_the_canonical_cbor_of_any_token_ids(
    token_ids: list[int], beyond_32_bits: list[int], block_size: int, num_blocks: int, algo: str
):
    digest = {"sha256_cbor": lambda b: hashlib.sha256(b).digest(), "xxhash_cbor": xxhash.xxh3_128_digest}[algo]
    token_ids = list(itertools.islice(itertools.cycle(token_ids + beyond_32_bits), num_blocks * block_size))
    hasher = BlockHasher(algo, block_size, seed="s")
    parent, expected = hasher.root, []
    for start in range(0, len(token_ids), block_size):
        block = (parent, tuple(token_ids[start : start + block_size]), None)
        parent = digest(cbor2.dumps(block, canonical=True))
        expected.append(parent)
    assert hashes_of(hasher, token_ids) == expected


@pytest.mark.parametrize("algo", ALGOS)
def test_hashing_token_by_token_equals_hashing_at_once(algo: str):
    hasher = BlockHasher(algo, 4, seed="s", namespace="n")
    spans = (
        ExtraKeySpan(0, None, "lora", b"\1" * 32),
        ExtraKeySpan(3, 9, "mm", "image"),
        ExtraKeySpan(0, 1, "cache_salt", "salt"),
        ExtraKeySpan(6, 7, "my_kind", "x"),
    )
    tokens = list(range(100, 123))
    request = make_request("r", tokens[:1], extra_key_spans=spans)
    for token in tokens[1:]:
        request.token_ids.append(token)
        hasher.extend(request)
    assert len(request.block_hashes) == 5
    assert request.block_hashes == hashes_of(hasher, tokens, spans)


@pytest.mark.parametrize("algo", OWN_ALGOS)
def test_own_layout_is_what_the_module_documents(algo: str):
    digest = {"sha256": lambda b: hashlib.sha256(b).digest(), "xxhash": xxhash.xxh3_128_digest}[algo]
    hasher = BlockHasher(algo, 2, seed=None if algo == "sha256" else "s", namespace="space")
    root = digest(b"foreword kv block v1\0space" + (b"" if algo == "sha256" else b"\0s"))
    key = struct.pack("<H", 2) + b"mm" + b"\0" + struct.pack("<I", 3) + b"pic" + struct.pack("<qq", 1, 2)
    first = digest(root + struct.pack("<III", 2, 7, 8) + struct.pack("<I", 1) + key)
    key = struct.pack("<H", 2) + b"mm" + b"\0" + struct.pack("<I", 3) + b"pic" + struct.pack("<qq", -1, 1)
    second = digest(first + struct.pack("<III", 2, 9, 10) + struct.pack("<I", 1) + key)
    assert hashes_of(hasher, [7, 8, 9, 10, 11], (ExtraKeySpan(1, 3, "mm", "pic"),)) == [first, second]


@pytest.mark.parametrize("algo", ALGOS)
def test_whatever_decides_the_content_decides_the_hash(algo: str):
    tokens = list(range(1, 9))
    hasher = BlockHasher(algo, 4, seed="s", namespace="n")
    variants = {
        "plain": hashes_of(hasher, tokens),
        "another token": hashes_of(hasher, [2, *tokens[1:]]),
        "salt": hashes_of(hasher, tokens, (ExtraKeySpan(0, 1, "cache_salt", "a"),)),
        "other salt": hashes_of(hasher, tokens, (ExtraKeySpan(0, 1, "cache_salt", "b"),)),
        "salt from a later token": hashes_of(hasher, tokens, (ExtraKeySpan(1, 2, "cache_salt", "a"),)),
        "image spelled like the salt": hashes_of(hasher, tokens, (ExtraKeySpan(0, 1, "mm", "a"),)),
        "image one token later": hashes_of(hasher, tokens, (ExtraKeySpan(1, 2, "mm", "a"),)),
        "own kind spelled like the salt": hashes_of(hasher, tokens, (ExtraKeySpan(0, 1, "cache_sal", "ta"),)),
        "bytes instead of text": hashes_of(hasher, tokens, (ExtraKeySpan(0, 1, "cache_salt", b"a"),)),
        "two keys": hashes_of(hasher, tokens, (ExtraKeySpan(0, 1, "cache_salt", "a"), ExtraKeySpan(0, 1, "mm", "a"))),
    }
    firsts = {name: hashes[0] for name, hashes in variants.items()}
    seconds = {name: hashes[1] for name, hashes in variants.items()}
    assert len(set(firsts.values())) == len(variants)
    assert len(set(seconds.values())) == len(variants), "a difference in the first block reaches the second by chaining"


@pytest.mark.parametrize("algo", ALGOS)
def test_the_order_of_spans_counts_only_for_pictures_that_share_one(algo: str):
    hasher = BlockHasher(algo, 4, seed="s")

    def hashes(kind: str, *keys: str) -> list[bytes]:
        return hashes_of(hasher, [0] * 8, tuple(ExtraKeySpan(1, 7, kind, key) for key in keys))

    assert hashes("mm", "cat", "dog", "cat")[0] != hashes("mm", "cat", "cat", "dog")[0]
    assert hashes("mm", "cat", "dog", "cat")[1] != hashes("mm", "cat", "cat", "dog")[1]
    assert hashes("cache_salt", "a", "b") == hashes("cache_salt", "b", "a")


@pytest.mark.parametrize("algo", OWN_ALGOS)
def test_own_modes_also_tell_span_lengths_apart_and_ignore_labels(algo: str):
    hasher = BlockHasher(algo, 4, seed="s")
    tokens = list(range(8))
    short = hashes_of(hasher, tokens, (ExtraKeySpan(1, 2, "mm", "a"),))
    long = hashes_of(hasher, tokens, (ExtraKeySpan(1, 3, "mm", "a"),))
    assert short[0] != long[0]
    assert hashes_of(hasher, tokens, (ExtraKeySpan(0, None, "lora", "d", label="x"),)) == hashes_of(
        hasher, tokens, (ExtraKeySpan(0, None, "lora", "d", label="y"),)
    )


@pytest.mark.parametrize("algo", ALGOS)
def test_a_span_touches_exactly_the_blocks_it_overlaps(algo: str):
    """The prefix-caching document's example: 41 image placeholders after 8 text tokens, block size 16."""
    tokens = [1, 3, 7493, 1681, 1294, 1593, 3937, 9551, *[8] * 41, 4]
    spans = (ExtraKeySpan(8, 49, "mm", "image hash"),)
    overlapping = spans_by_block(spans, 0, 4, 16)
    assert [len(block) for block in overlapping] == [1, 1, 1, 1]
    hasher = BlockHasher(algo, 16, seed="s")
    assert len(hashes_of(hasher, tokens, spans)) == 3, "the fourth block is partial and has no hash"
    assert [len(block) for block in spans_by_block((ExtraKeySpan(16, 32, "mm", "i"),), 0, 4, 16)] == [0, 1, 0, 0]
    assert [len(block) for block in spans_by_block((ExtraKeySpan(31, 33, "mm", "i"),), 1, 2, 16)] == [1, 1]


@pytest.mark.parametrize("algo", ALGOS)
def test_the_published_example_of_a_picture_in_every_block_of_a_prompt(algo: str):
    token_ids = [1, 3, 7493, 1681, 1294, 1593, 3937, 9551, *[10] * 41, 4]
    picture = ExtraKeySpan(8, 49, "mm", "a picture's hash")
    blocks = spans_by_block([picture], 0, -(-len(token_ids) // 16), 16)
    assert blocks == [[picture]] * 4, "its 41 placeholders reach into the fourth block, which is not full"
    tags = [tagged_extra_keys(spans, 16 * index, 16 * index + 16) for index, spans in enumerate(blocks)]
    assert tags == [(("mm", "a picture's hash", start),) for start in (8, -8, -24, -40)]

    hasher = BlockHasher(algo, 16, seed="s")
    hashes = hashes_of(hasher, token_ids, (picture,))
    assert len(hashes) == 3, "a block that is not full has no hash"
    filled = hashes_of(hasher, [*token_ids, *range(100, 114)], (picture,))
    other = hashes_of(hasher, [*token_ids, *range(100, 114)], (ExtraKeySpan(8, 49, "mm", "another's"),))
    assert filled[:3] == hashes and len({*filled, *other}) == 8


@pytest.mark.parametrize("algo", ALGOS)
def test_chains_of_different_namespaces_never_meet(algo: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    one, other = BlockHasher(algo, 4, namespace="one"), BlockHasher(algo, 4, namespace="other")
    assert one.root != other.root
    assert not set(hashes_of(one, list(range(40)))) & set(hashes_of(other, list(range(40))))


def test_only_cryptographic_roots_are_stable_without_a_seed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    for algo in ("sha256", "sha256_cbor"):
        assert BlockHasher(algo, 4, namespace="n").root == BlockHasher(algo, 4, namespace="n").root
    assert not caplog.records
    for algo in ("xxhash", "xxhash_cbor"):
        assert BlockHasher(algo, 4, namespace="n").root != BlockHasher(algo, 4, namespace="n").root
        assert BlockHasher(algo, 4, seed="s").root == BlockHasher(algo, 4, seed="s").root
    assert "not_cryptographic" in caplog.text


def test_an_unknown_algorithm_is_named():
    with pytest.raises(InvalidConfigError, match=r"prefix_caching_hash_algo.*md5"):
        BlockHasher("md5", 16)


@pytest.mark.parametrize("num_blocks", [1, 12, 40])
def test_token_ids_beyond_32_bits_are_an_error_not_a_collision(num_blocks: int):
    hasher = BlockHasher("sha256", 1)
    for token_id in (-1, 2**32):
        with pytest.raises(OverflowError):
            hasher.extend(make_request("r", [0] * (num_blocks - 1) + [token_id]))


@pytest.mark.parametrize("algo", ALGOS)
def test_a_prompt_hashed_in_two_parts_has_the_same_hashes(algo: str):
    hasher = BlockHasher(algo, 4, seed="s", namespace="n")
    tokens = [token % 2**32 for token in range(0, 2**34, 2**34 // 160)]
    whole = hashes_of(hasher, tokens)
    for first_part in (4, 60, 140):
        request = make_request("r", tokens[:first_part])
        hasher.extend(request)
        request.token_ids += tokens[first_part:]
        hasher.extend(request)
        assert request.block_hashes == whole
