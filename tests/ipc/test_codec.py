"""Messages survive the wire, large things are not copied, and nothing that comes in can do harm."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc.codec import PROTOCOL_VERSION, Blob, Decoder, WireError, WireLimits, encode, pack_header, read_header
from ipc.messages import (
    AbortRequests,
    AddRequest,
    EngineCapabilities,
    EngineMessage,
    EngineOutputs,
    EngineRequest,
    ExtraKeySpan,
    FrontendMessage,
    Goodbye,
    Heartbeat,
    Hello,
    Refused,
    RequestError,
    RequestOutput,
    SamplingParams,
    Welcome,
)


class Picture(msgspec.Struct, array_like=True, tag="picture"):
    pixels: np.ndarray
    name: str = ""
    source: Blob | None = None


REQUEST = EngineRequest(
    "r-1",
    [1, 2, 3, 2**40],
    SamplingParams(temperature=0.5, seed=-7, max_tokens=9, stop_token_ids=(4, 5)),
    extra_key_spans=(ExtraKeySpan(0, 1, "cache_salt", "s"), ExtraKeySpan(1, None, "mm", b"\xff\x00", "picture")),
    arrival_time_s=12.5,
)
FRONTEND_MESSAGES = [Hello(), AddRequest(REQUEST), AbortRequests(["a", "b"]), Heartbeat(), Goodbye()]
ENGINE_MESSAGES = [
    Welcome(EngineCapabilities("m", 100, 50, 16, 8, "sha256", "00ff")),
    Refused("no"),
    EngineOutputs([RequestOutput("r", [1, 2], 16, "error", error=RequestError("invalid", "bad", "seed"))]),
    Heartbeat(),
    Goodbye(),
]


def reason_of(decoder: Decoder[Any], frames: list[Any]) -> str:
    with pytest.raises(WireError) as caught:
        decoder.decode(frames)
    return caught.value.reason


@pytest.mark.parametrize("message", FRONTEND_MESSAGES, ids=lambda m: type(m).__name__)
def test_frontend_messages_survive(message: FrontendMessage) -> None:
    assert Decoder(FrontendMessage).decode(encode(message, 2**64 - 1)) == (2**64 - 1, message)


@pytest.mark.parametrize("message", ENGINE_MESSAGES, ids=lambda m: type(m).__name__)
def test_engine_messages_survive(message: EngineMessage) -> None:
    assert Decoder(EngineMessage).decode(encode(message, 7)) == (7, message)


def test_string_and_bytes_span_keys_stay_what_they_are() -> None:
    spans = (ExtraKeySpan(0, 1, "k", "ab"), ExtraKeySpan(0, 1, "k", b"ab"))
    frames = encode(AddRequest(EngineRequest("r", [1], extra_key_spans=spans)), 1)
    decoded = Decoder[FrontendMessage](FrontendMessage).decode(frames)[1]
    assert isinstance(decoded, AddRequest)
    assert [type(span.key) for span in decoded.request.extra_key_spans] == [str, bytes]


def test_the_span_key_must_be_string_or_bytes() -> None:
    frames = encode(AddRequest(REQUEST), 1)
    body = msgspec.msgpack.decode(frames[1])
    body[1][3][0][3] = 17
    assert reason_of(Decoder(FrontendMessage), [frames[0], msgspec.msgpack.encode(body)]) == "body"


@pytest.mark.parametrize("dtype", ["bool", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)])
def test_arrays_survive(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.asarray(np.random.default_rng(0).integers(0, 2, shape)).astype(dtype)
    _, picture = Decoder(Picture).decode(encode(Picture(array), 1))
    assert picture.pixels.dtype == array.dtype and picture.pixels.shape == array.shape
    np.testing.assert_array_equal(picture.pixels, array)


def test_large_values_share_memory_with_their_frames_on_both_sides() -> None:
    pixels, source = np.arange(100_000, dtype=np.float32).reshape(100, 1000), bytes(50_000)
    frames = encode(Picture(pixels, source=Blob(source)), 1)
    assert len(frames) == 4 and len(frames[1]) < 100
    assert np.shares_memory(np.frombuffer(frames[2], np.uint8), pixels)
    assert np.shares_memory(np.frombuffer(frames[3], np.uint8), np.frombuffer(source, np.uint8))
    _, picture = Decoder(Picture).decode(frames)
    assert np.shares_memory(picture.pixels, pixels)
    assert np.shares_memory(np.frombuffer(picture.source.data, np.uint8), np.frombuffer(source, np.uint8))


def test_arrays_from_a_socket_share_memory_with_what_was_received() -> None:
    with zmq.Context() as context, context.socket(zmq.PAIR) as left, context.socket(zmq.PAIR) as right:
        left.bind("inproc://pair")
        right.connect("inproc://pair")
        pixels = np.arange(100_000, dtype=np.int64)
        left.send_multipart(encode(Picture(pixels, "p"), 3), copy=False)
        received = right.recv_multipart(copy=False)
        _, picture = Decoder(Picture).decode([frame.buffer for frame in received])
        assert np.shares_memory(picture.pixels, np.frombuffer(received[2].buffer, np.uint8))
        np.testing.assert_array_equal(picture.pixels, pixels)


def test_a_non_contiguous_array_arrives_whole() -> None:
    array = np.arange(24).reshape(4, 6)[:, ::2]
    _, picture = Decoder(Picture).decode(encode(Picture(array), 1))
    np.testing.assert_array_equal(picture.pixels, array)


@pytest.mark.parametrize(
    "array", [np.array([object()]), np.array(["text"]), np.zeros(2, ">f4"), np.zeros((1,) * 9), np.zeros(1, "M8[s]")]
)
def test_what_has_no_plain_layout_is_refused_by_the_sender(array: np.ndarray) -> None:
    with pytest.raises(WireError) as caught:
        encode(Picture(array), 1)
    assert caught.value.reason == "body"


def test_the_version_is_read_from_the_header_alone() -> None:
    header = pack_header(5, version=PROTOCOL_VERSION + 1) + b"whatever a later header adds"
    assert read_header([header]) == (PROTOCOL_VERSION + 1, 5)
    assert reason_of(Decoder(FrontendMessage), [header, b"\xc1 not even MessagePack"]) == "version"
    assert reason_of(Decoder(FrontendMessage), [header]) == "version"


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "header"),
        ([b""], "header"),
        ([b"FWRD"], "header"),
        ([b"JUNK" + bytes(12)], "header"),
        ([pack_header(1)], "frames"),
        ([pack_header(1), b""], "body"),
        ([pack_header(1), b"\xc1"], "body"),
        ([pack_header(1), msgspec.msgpack.encode(["hello"]) + b"\x00"], "body"),
        ([pack_header(1), msgspec.msgpack.encode(["welcome"])], "body"),
        ([pack_header(1), msgspec.msgpack.encode(["abort", "not a list"])], "body"),
        ([pack_header(1), msgspec.msgpack.encode(["abort", [1]])], "body"),
        ([pack_header(1), b"\x92\xa5abort\xdd\xff\xff\xff\xff"], "body"),
        ([pack_header(1), b"\x92\xa5abort\x91\xdb\xff\xff\xff\xff"], "body"),
        ([pack_header(1), b"\x92\xa5abort\x91\xa2\xff\xfe"], "body"),
        ([pack_header(1), b"\x92\xa5hello" + b"\x91" * 1_000_000], "body"),
        ([pack_header(1), b"\x92\xa5hello" + b"\x81\x01" * 1_000_000], "body"),
        ([pack_header(1), msgspec.msgpack.encode(["hello"]), *[b""] * 2000], "frames"),
        ([pack_header(1), bytes(17 << 20)], "too_large"),
    ],
)
def test_malformed_frames_have_one_exception_with_a_reason(frames: list[bytes], reason: str) -> None:
    assert reason_of(Decoder(FrontendMessage), frames) == reason


@pytest.mark.parametrize(
    "reference",
    [
        None,
        0,
        [0, "<f4"],
        [1, "<f4", [2]],
        [-1, "<f4", [2]],
        [True, "<f4", [2]],
        ["0", "<f4", [2]],
        [0, "|O", [1]],
        [0, ">f4", [2]],
        [0, "<f4,<f4", [1]],
        [0, ["<f4"], [2]],
        [0, "<f4", 2],
        [0, "<f4", [3]],
        [0, "<f4", [-1, -2]],
        [0, "<f4", [2.0]],
        [0, "<f4", [True, 2]],
        [0, "<f4", [1] * 9],
        [0, "<f4", [2**62, 4]],
        [1, "<f4", [0, 2**31 - 1, 2**31 - 1, 2**31 - 1]],
    ],
)
def test_an_array_that_does_not_fit_its_payload_is_refused(reference: Any) -> None:
    body = msgspec.msgpack.encode(["picture", reference])
    assert reason_of(Decoder(Picture), [pack_header(1), body, bytes(8)]) in {"payload", "body"}


def test_limits_hold_for_senders_and_receivers() -> None:
    frames = encode(Picture(np.zeros(1000, np.uint8)), 1)
    for limits in (WireLimits(max_frame_bytes=999), WireLimits(max_total_bytes=1000)):
        assert reason_of(Decoder(Picture, limits), frames) == "too_large"
        with pytest.raises(WireError, match="too_large"):
            encode(Picture(np.zeros(1000, np.uint8)), 1, limits)
    with pytest.raises(WireError, match="too_large"):
        encode(AddRequest(EngineRequest("r", [7] * (17 << 20))), 1)


def test_a_decoder_is_as_good_as_new_after_an_error() -> None:
    decoder = Decoder(Picture)
    frames = encode(Picture(np.arange(4)), 1)
    assert reason_of(decoder, frames[:2]) == "payload"
    assert decoder.decode(frames)[1].pixels.tolist() == [0, 1, 2, 3]
    # Payloads of one message are not left behind for the next.
    assert reason_of(decoder, frames[:2]) == "payload"


def decode_or_reason(message_type: Any, frames: Sequence[Any]) -> Any:
    """Anything but a message or a WireError with a reason fails the test."""
    try:
        return Decoder[Any](message_type).decode(frames)
    except WireError as error:
        return error.reason


json_like: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.sampled_from(["hello", "add", "abort", "welcome", "outputs", "picture", "<f4"]),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=20,
)
bodies = st.binary(max_size=64) | json_like.map(msgspec.msgpack.encode)
headers = st.binary(max_size=24) | st.just(pack_header(1)) | st.builds(pack_header, st.just(1), st.integers(0, 3))


@settings(max_examples=1500, deadline=None)
@given(st.lists(st.binary(max_size=16), max_size=3), headers, bodies)
def test_decoding_is_total(payloads: list[bytes], header: bytes, body: bytes) -> None:
    for message_type in (FrontendMessage, EngineMessage, Picture):
        for frames in ([header, body, *payloads], payloads, [header]):
            assert decode_or_reason(message_type, frames)


@settings(max_examples=500, deadline=None)
@given(st.randoms(use_true_random=False))
def test_decoding_is_total_for_damaged_messages(rng: random.Random) -> None:
    message = rng.choice([*FRONTEND_MESSAGES, *ENGINE_MESSAGES, Picture(np.arange(6.0).reshape(2, 3), "p", Blob(b"x"))])
    frames = [bytearray(frame) for frame in encode(message, 1)]
    for _ in range(rng.randint(1, 4)):
        frame = rng.choice(frames)
        action = rng.randrange(4)
        if action == 0 and frame:
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        elif action == 1:
            del frame[rng.randrange(len(frame) + 1) :]
        elif action == 2:
            frame += rng.randbytes(rng.randint(1, 8))
        else:
            frames.remove(frame)
            if not frames:
                break
    for message_type in (FrontendMessage, EngineMessage, Picture):
        assert decode_or_reason(message_type, [memoryview(frame) for frame in frames])
