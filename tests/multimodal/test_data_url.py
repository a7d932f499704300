"""`data:` URLs: what is read, and what is refused before it is decoded."""

from __future__ import annotations

import base64
import tracemalloc
from urllib.parse import quote_from_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimodal.data_url import PIECE_CHARS, decode_data_url
from multimodal.errors import MediaError

MAX_BYTES = 4 << 20


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


@given(st.binary(max_size=200), st.sampled_from(["", "image/png", "image/png;charset=x", "text/html"]))
def test_what_was_put_in_comes_out(content, media_type):
    assert decode_data_url(f"data:{media_type};base64,{encoded(content)}", MAX_BYTES) == content
    assert decode_data_url(f"data:{media_type},{quote_from_bytes(content)}", MAX_BYTES) == content


@pytest.mark.parametrize("num_bytes", [PIECE_CHARS // 4 * 3 + change for change in range(-3, 4)])
def test_long_ones_are_decoded_in_pieces(num_bytes):
    content = bytes(range(256)) * (num_bytes // 256) + bytes(num_bytes % 256)
    assert decode_data_url("data:;base64," + encoded(content), MAX_BYTES) == content


@pytest.mark.parametrize("before", range(4))
def test_an_escape_is_never_cut_in_two(before):
    text = "a" * (PIECE_CHARS - before) + "%41" * 5
    assert decode_data_url("data:," + text, MAX_BYTES) == b"a" * (PIECE_CHARS - before) + b"AAAAA"


def test_base64_may_be_wrapped_and_escaped():
    assert decode_data_url("data:image/png;BASE64,aG\r\nVs bG8%3D\t", MAX_BYTES) == b"hello"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:image/png;base64", "comma"),
        ("data:;base64,aGVsbG8", "7 characters"),
        ("data:;base64,aGVsbG8==", "9 characters"),
        ("data:;base64,aGVs=GVs", "broken"),
        ("data:;base64,aGVsbA==aGVs", "before its end"),
        ("data:;base64,a===", "broken"),
        ("data:;base64,aGV-", "broken"),
        ("data:;base64,aGV_", "broken"),
        ("data:;base64,aGVé", "not base64"),
        ("data:;base64,%FFaaa", "not base64"),
    ],
)
def test_broken_ones_are_refused_with_a_reason(url, reason):
    with pytest.raises(MediaError, match=reason):
        decode_data_url(url, MAX_BYTES)


@pytest.mark.parametrize("head", ["data:;base64,", "data:,"])
def test_the_limit_is_exact(head):
    content = b"x" * 1000
    url = head + (encoded(content) if "base64" in head else content.decode())
    assert decode_data_url(url, 1000) == content
    with pytest.raises(MediaError, match="1000 bytes, more than 999"):
        decode_data_url(url, 999)


@pytest.mark.parametrize(
    "url", ["data:;base64," + "A" * (8 << 20), "data:," + "%41" * (3 << 20), "data:,é" * (1 << 20)]
)
def test_too_large_ones_are_refused_before_they_are_decoded(url):
    tracemalloc.start()
    with pytest.raises(MediaError, match=r"more than 1000$"):
        decode_data_url(url, 1000)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 3 * len(url), "the body is cut off, nothing else"


def test_escapes_take_no_memory_of_their_own():
    url = "data:," + "%41" * (1 << 19)
    tracemalloc.start()
    assert decode_data_url(url, MAX_BYTES) == b"A" * (1 << 19)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 15 * len(url)
