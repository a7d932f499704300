"""What makes two pictures the same, and what does not."""

import hashlib
import logging
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimodal.content_hash import ContentHasher, encode_value, feature_key

ALGOS = ("sha256", "blake3", "xxhash")


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def hash_of(pixels: np.ndarray, hasher: ContentHasher | None = None, **decides: object) -> bytes:
    hasher = hasher or ContentHasher()
    decides = {"options": {}, "fingerprint": "p"} | decides
    return hasher.content(hasher.pixels(pixels), **decides)  # type: ignore[arg-type]


def test_the_layout_is_the_documented_one():
    pixels = picture(2, 3)
    digest = hashlib.sha256(b"foreword pixels v1\0" + struct.pack("<III", 2, 3, 3) + pixels.tobytes()).digest()
    assert ContentHasher().pixels(pixels) == digest
    value = b"m\x02\0\0\0" + b"s\x01\0\0\0a" + b"l\x02\0\0\0n" + b"i\x02\0\0\0-7" + b"s\x01\0\0\0bt"
    expected = hashlib.sha256(
        b"foreword picture v1\0" + b"\x20\0\0\0" + digest + b"\x02" + b"\x04\0\0\0proc" + value
    ).digest()
    options = {"b": True, "a": (None, -7)}
    assert hash_of(pixels, options=options, fingerprint="proc", stands_alone=True) == expected


@pytest.mark.parametrize("algo", ALGOS)
class TestEveryAlgorithm:
    def test_one_changed_pixel_is_another_picture(self, algo: str):
        hasher, pixels = ContentHasher(algo), picture(20, 30)
        changed = pixels.copy()
        changed[19, 29, 2] ^= 1
        assert hash_of(pixels, hasher) == hash_of(pixels.copy(), hasher) != hash_of(changed, hasher)

    def test_equal_bytes_of_another_shape_are_another_picture(self, algo: str):
        hasher, pixels = ContentHasher(algo), picture(30, 100)
        assert hash_of(pixels, hasher) != hash_of(pixels.reshape(100, 30, 3), hasher)

    def test_pictures_match_where_their_pixels_do_and_only_there(self, algo: str):
        hasher, square = ContentHasher(algo), picture(16, 16)
        turned = np.rot90(square)
        assert hash_of(square, hasher) != hash_of(turned, hasher)
        # The memory layout is none of the picture's.
        assert hash_of(np.rot90(turned, 3), hasher) == hash_of(square, hasher)
        assert hash_of(np.asfortranarray(square), hasher) == hash_of(square, hasher)
        grey = np.full((8, 8, 3), 7, np.uint8)
        assert hash_of(np.rot90(grey), hasher) == hash_of(grey, hasher)

    def test_whatever_else_the_model_sees_decides(self, algo: str):
        hasher, pixels = ContentHasher(algo), picture(4, 4)
        hashes = [
            hash_of(pixels, hasher),
            hash_of(pixels, hasher, options={"detail": "low"}),
            hash_of(pixels, hasher, options={"detail": "auto"}),
            hash_of(pixels, hasher, options={"max_pixels": 1}),
            hash_of(pixels, hasher, options={"max_pixels": 1.0}),
            hash_of(pixels, hasher, options={"max_pixels": True}),
            hash_of(pixels, hasher, fingerprint="another"),
            hash_of(pixels, hasher, stands_alone=False),
            hash_of(pixels, hasher, stands_alone=True),
        ]
        assert len(set(hashes)) == len(hashes)

    def test_a_file_is_never_taken_for_pixels(self, algo: str):
        hasher, pixels = ContentHasher(algo), picture(4, 4)
        assert hasher.encoded(pixels.tobytes()) != hasher.pixels(pixels)

    def test_a_url_is_never_taken_for_a_file(self, algo: str):
        hasher = ContentHasher(algo)
        assert hasher.encoded("data:,x") != hasher.encoded(b"data:,x")

    def test_70000_tiny_pictures_have_70000_keys(self, algo: str):
        hasher = ContentHasher(algo)
        # Every 1×1 picture of a few colours, every shape of a few pixels: as alike as pictures can be.
        numbers = np.arange(70_000, dtype=np.uint32)
        rows = np.stack([numbers & 0xFF, (numbers >> 8) & 0xFF, numbers >> 16], axis=1).astype(np.uint8)
        hashes = {hash_of(row.reshape(1, 1, 3), hasher) for row in rows}
        assert len(hashes) == 70_000
        assert len({feature_key(content, "") for content in hashes}) == 70_000


def test_digests_are_never_cut():
    assert len(hash_of(picture(2, 2))) == len(hash_of(picture(2, 2), ContentHasher("blake3"))) == 32
    assert len(hash_of(picture(2, 2), ContentHasher("xxhash", seed="s"))) == 16
    assert len(feature_key(bytes(16), "")) == 32


def test_only_rgb_bytes_are_hashed():
    with pytest.raises(ValueError, match=r"not float32 \[2, 2, 3\]"):
        ContentHasher().pixels(np.zeros((2, 2, 3), np.float32))
    with pytest.raises(ValueError, match=r"not uint8 \[2, 2\]"):
        ContentHasher().pixels(np.zeros((2, 2), np.uint8))


def test_the_tenant_decides_the_key_but_not_the_content_hash():
    content = hash_of(picture(2, 2))
    keys = {feature_key(content, tenant) for tenant in ("", "a", "b")}
    assert len(keys) == 3
    # Framed: what stands left of the border is never taken for what stands right of it.
    assert feature_key(content + b"a", "b") != feature_key(content, "ab")


def test_xxhash_warns_and_differs_per_process_unless_seeded(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        first, second = ContentHasher("xxhash"), ContentHasher("xxhash")
    assert "hash_not_cryptographic algo=xxhash risk=" in caplog.text
    pixels = picture(3, 3)
    assert hash_of(pixels, first) != hash_of(pixels, second)
    assert first.pixels(pixels) != second.pixels(pixels)
    seeded = [hash_of(pixels, ContentHasher("xxhash", seed=seed)) for seed in ("one", "one", "two")]
    assert seeded[0] == seeded[1] != seeded[2]


def test_blake3_that_is_not_installed_is_said_plainly(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "blake3", None)
    with pytest.raises(ValueError, match="mm_hash_algo: blake3 needs the Python package blake3"):
        ContentHasher("blake3")


def test_an_unknown_algorithm_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"mm_hash_algo: 'md5' is none of sha256, blake3, xxhash"):
        ContentHasher("md5")  # type: ignore[arg-type]


def test_the_hash_is_the_same_in_every_process():
    program = (
        "import numpy as np; from multimodal.content_hash import ContentHasher; h = ContentHasher()\n"
        "print(h.content(h.pixels(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)),"
        " options={'b': 1, 'a': {'x': 0.5}}, fingerprint='p').hex())"
    )
    printed = [
        subprocess.run([sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True)
        for seed in ("1", "2")
    ]
    here = hash_of(np.arange(48, dtype=np.uint8).reshape(4, 4, 3), options={"a": {"x": 0.5}, "b": 1})
    assert {run.stdout.decode().strip() for run in printed} == {here.hex()}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def told_apart(value: object) -> object:
    """A value in a form whose equality is sameness: Python holds 1, 1.0 and True for equal, and 0.0 and -0.0."""
    match value:
        case dict():
            return "map", frozenset((key, told_apart(inner)) for key, inner in value.items())
        case list():
            return "list", tuple(told_apart(inner) for inner in value)
        case _:
            return type(value).__name__, repr(value)


@given(VALUES, VALUES)
def test_values_have_equal_bytes_exactly_where_they_are_equal(one: object, other: object):
    assert (encode_value(one) == encode_value(other)) == (told_apart(one) == told_apart(other))


def test_what_is_no_value_is_refused():
    with pytest.raises(TypeError, match="cannot have a set in them"):
        encode_value({"size": {1, 2}})
