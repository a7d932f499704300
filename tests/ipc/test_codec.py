"""Messages survive the wire, large things are not copied, and nothing that comes in can do harm."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
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
    EngineMessage,
    EngineOutputs,
    FrontendMessage,
    Goodbye,
    Heartbeat,
    Hello,
    Refused,
    SupplyFeature,
    WantFeatures,
    Welcome,
)
from ipc.vocabulary import (
    EngineCapabilities,
    EngineRequest,
    ExtraKeySpan,
    MultimodalFeature,
    RequestError,
    RequestOutput,
    SamplingParams,
    WantedFeature,
)
from tests.mutations import mutate


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
    mm_features=(MultimodalFeature(b"\xff\x00", 1, 3, ((0, 1), (2, 3)), 1024, {"image_grid_thw": (1, 2, 2)}),),
)
FRONTEND_MESSAGES = [
    Hello(),
    AddRequest(REQUEST),
    SupplyFeature("r-1", b"\xff\x00", error=RequestError("invalid", "gone", "messages")),
    AbortRequests(["a", "b"], [("c", 1)]),
    Heartbeat(),
    Goodbye(),
]
ENGINE_MESSAGES = [
    Welcome(EngineCapabilities("m", 100, 50, 16, 8, "sha256", "00ff"), 7),
    Refused("no"),
    EngineOutputs([RequestOutput("r", [1, 2], 16, "error", error=RequestError("invalid", "bad", "seed"))]),
    WantFeatures([WantedFeature("r", b"\xff\x00"), WantedFeature("r", b"")]),
    Heartbeat(),
    Goodbye(),
]


def reason_of(decoder: Decoder[Any], frames: list[Any]) -> str:
    with pytest.raises(WireError) as caught:
        decoder.decode(frames)
    return caught.value.reason


@pytest.mark.parametrize("message", FRONTEND_MESSAGES, ids=lambda m: type(m).__name__)
def test_frontend_messages_survive(message: FrontendMessage) -> None:
    assert Decoder(FrontendMessage).decode(encode(message, 2**64 - 1, 2**64 - 2)) == (2**64 - 1, 2**64 - 2, message)


@pytest.mark.parametrize("message", ENGINE_MESSAGES, ids=lambda m: type(m).__name__)
def test_engine_messages_survive(message: EngineMessage) -> None:
    assert Decoder(EngineMessage).decode(encode(message, 7, 1)) == (7, 1, message)


def test_inputs_survive_by_name_and_without_a_copy() -> None:
    pixels = np.arange(30_000, dtype=np.float32).reshape(3, -1)
    inputs = {"pixel_values": pixels, "image_grid_thw": np.array([[1, 2, 3]])}
    frames = encode(SupplyFeature("r", b"key", inputs), 1, 1)
    assert len(frames) == 4 and len(frames[1]) < 150
    supply = Decoder[FrontendMessage](FrontendMessage).decode(frames).message
    assert isinstance(supply, SupplyFeature)
    assert (supply.request_id, supply.key, supply.error, list(supply.inputs)) == ("r", b"key", None, list(inputs))
    for name, array in inputs.items():
        np.testing.assert_array_equal(supply.inputs[name], array)
    assert np.shares_memory(supply.inputs["pixel_values"], pixels)


def test_string_and_bytes_span_keys_stay_what_they_are() -> None:
    spans = (ExtraKeySpan(0, 1, "k", "ab"), ExtraKeySpan(0, 1, "k", b"ab"))
    frames = encode(AddRequest(EngineRequest("r", [1], extra_key_spans=spans)), 1, 1)
    decoded = Decoder[FrontendMessage](FrontendMessage).decode(frames).message
    assert isinstance(decoded, AddRequest)
    assert [type(span.key) for span in decoded.request.extra_key_spans] == [str, bytes]


def test_the_span_key_must_be_string_or_bytes() -> None:
    frames = encode(AddRequest(REQUEST), 1, 1)
    body = msgspec.msgpack.decode(frames[1])
    body[1][3][0][3] = 17
    assert reason_of(Decoder(FrontendMessage), [frames[0], msgspec.msgpack.encode(body)]) == "body"


@pytest.mark.parametrize("dtype", ["bool", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)])
def test_arrays_survive(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.asarray(np.random.default_rng(0).integers(0, 2, shape)).astype(dtype)
    picture = Decoder(Picture).decode(encode(Picture(array), 1, 1)).message
    assert picture.pixels.dtype == array.dtype and picture.pixels.shape == array.shape
    np.testing.assert_array_equal(picture.pixels, array)


def test_large_values_share_memory_with_their_frames_on_both_sides() -> None:
    pixels, source = np.arange(100_000, dtype=np.float32).reshape(100, 1000), bytes(50_000)
    frames = encode(Picture(pixels, source=Blob(source)), 1, 1)
    assert len(frames) == 4 and len(frames[1]) < 100
    assert np.shares_memory(np.frombuffer(frames[2], np.uint8), pixels)
    assert np.shares_memory(np.frombuffer(frames[3], np.uint8), np.frombuffer(source, np.uint8))
    picture = Decoder(Picture).decode(frames).message
    assert np.shares_memory(picture.pixels, pixels)
    assert np.shares_memory(np.frombuffer(picture.source.data, np.uint8), np.frombuffer(source, np.uint8))


def test_arrays_from_a_socket_share_memory_with_what_was_received() -> None:
    with zmq.Context() as context, context.socket(zmq.PAIR) as left, context.socket(zmq.PAIR) as right:
        left.bind("inproc://pair")
        right.connect("inproc://pair")
        pixels = np.arange(100_000, dtype=np.int64)
        left.send_multipart(encode(Picture(pixels, "p"), 3, 1), copy=False)
        received = right.recv_multipart(copy=False)
        picture = Decoder(Picture).decode([frame.buffer for frame in received]).message
        assert np.shares_memory(picture.pixels, np.frombuffer(received[2].buffer, np.uint8))
        np.testing.assert_array_equal(picture.pixels, pixels)


def test_a_non_contiguous_array_arrives_whole() -> None:
    array = np.arange(24).reshape(4, 6)[:, ::2]
    picture = Decoder(Picture).decode(encode(Picture(array), 1, 1)).message
    np.testing.assert_array_equal(picture.pixels, array)


@pytest.mark.parametrize(
    "array", [np.array([object()]), np.array(["text"]), np.zeros(2, ">f4"), np.zeros((1,) * 9), np.zeros(1, "M8[s]")]
)
def test_what_has_no_plain_layout_is_refused_by_the_sender(array: np.ndarray) -> None:
    with pytest.raises(WireError) as caught:
        encode(Picture(array), 1, 1)
    assert caught.value.reason == "body"


def test_the_version_is_read_from_the_header_alone() -> None:
    header = pack_header(5, 8, version=PROTOCOL_VERSION + 1) + b"whatever a later header adds"
    assert read_header([header]) == (PROTOCOL_VERSION + 1, 5)
    assert reason_of(Decoder(FrontendMessage), [header, b"\xc1 not even MessagePack"]) == "version"
    assert reason_of(Decoder(FrontendMessage), [header]) == "version"


def test_the_header_is_what_its_documentation_says() -> None:
    header = encode(Picture(np.zeros(1)), 0x0102, 0x0304)[0]
    assert header == b"FWRD" + b"\7\0" + b"\3\0" + b"\2\1\0\0\0\0\0\0" + b"\4\3\0\0\0\0\0\0"


def test_the_first_protocol_is_told_from_ours() -> None:
    header = b"FWRD" + b"\1\0" + b"\0\0" + b"\7" + bytes(7)
    assert read_header([header]) == (1, 7)
    assert reason_of(Decoder(FrontendMessage), [header, msgspec.msgpack.encode(["hello"])]) == "version"


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "header"),
        ([b""], "header"),
        ([b"FWRD"], "header"),
        ([b"JUNK" + bytes(20)], "header"),
        ([pack_header(1, 1)[:-1], b""], "header"),
        ([pack_header(1, 1) + b"\0", b""], "header"),
        ([pack_header(1, 1)], "frames"),
        ([pack_header(1, 1, num_frames=1)], "frames"),
        ([pack_header(1, 1, num_frames=3), msgspec.msgpack.encode(["hello"])], "frames"),
        ([pack_header(1, 1), b""], "body"),
        ([pack_header(1, 1), b"\xc1"], "body"),
        ([pack_header(1, 1), msgspec.msgpack.encode(["hello"]) + b"\x00"], "body"),
        ([pack_header(1, 1), msgspec.msgpack.encode(["welcome"])], "body"),
        ([pack_header(1, 1), msgspec.msgpack.encode(["abort", "not a list"])], "body"),
        ([pack_header(1, 1), msgspec.msgpack.encode(["abort", [1]])], "body"),
        ([pack_header(1, 1), b"\x92\xa5abort\xdd\xff\xff\xff\xff"], "body"),
        ([pack_header(1, 1), b"\x92\xa5abort\x91\xdb\xff\xff\xff\xff"], "body"),
        ([pack_header(1, 1), b"\x92\xa5abort\x91\xa2\xff\xfe"], "body"),
        ([pack_header(1, 1), b"\x92\xa5hello" + b"\x91" * 1_000_000], "body"),
        ([pack_header(1, 1), b"\x92\xa5hello" + b"\x81\x01" * 1_000_000], "body"),
        ([pack_header(1, 1), msgspec.msgpack.encode(["hello"]), *[b""] * 2], "frames"),
        ([pack_header(1, 1, num_frames=2002), msgspec.msgpack.encode(["hello"]), *[b""] * 2000], "frames"),
        ([pack_header(1, 1), bytes(17 << 20)], "too_large"),
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
    assert reason_of(Decoder(Picture), [pack_header(1, 1, num_frames=3), body, bytes(8)]) in {"payload", "body"}


def test_limits_hold_for_senders_and_receivers() -> None:
    frames = encode(Picture(np.zeros(1000, np.uint8)), 1, 1)
    for limits in (WireLimits(max_frame_bytes=999), WireLimits(max_total_bytes=1000)):
        assert reason_of(Decoder(Picture, limits), frames) == "too_large"
        with pytest.raises(WireError, match="too_large"):
            encode(Picture(np.zeros(1000, np.uint8)), 1, 1, limits)
    with pytest.raises(WireError, match="too_large"):
        encode(AddRequest(EngineRequest("r", [7] * (17 << 20))), 1, 1)


def test_a_decoder_is_as_good_as_new_after_an_error() -> None:
    decoder = Decoder(Picture)
    frames = encode(Picture(np.arange(4)), 1, 1)
    without_payload = [pack_header(1, 1), frames[1]]
    assert reason_of(decoder, without_payload) == "payload"
    assert decoder.decode(frames).message.pixels.tolist() == [0, 1, 2, 3]
    # Payloads of one message are not left behind for the next.
    assert reason_of(decoder, without_payload) == "payload"


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
headers = (
    st.binary(max_size=24)
    | st.just(pack_header(1, 1))
    | st.builds(partial(pack_header, 1, 1), num_frames=st.integers(0, 6))
)


@settings(max_examples=1500, deadline=None)
@given(st.lists(st.binary(max_size=16), max_size=3), headers, bodies)
def test_decoding_is_total(payloads: list[bytes], header: bytes, body: bytes) -> None:
    for message_type in (FrontendMessage, EngineMessage, Picture):
        for frames in ([header, body, *payloads], payloads, [header]):
            assert decode_or_reason(message_type, frames)


FUZZED: list[tuple[Any, list[bytes | memoryview]]] = [
    *((FrontendMessage, encode(message, 1, 5)) for message in FRONTEND_MESSAGES),
    *((EngineMessage, encode(message, 1, 5)) for message in ENGINE_MESSAGES),
    (FrontendMessage, encode(SupplyFeature("r", b"key", {"pixels": np.arange(6.0), "size": np.array([2, 3])}), 1, 5)),
    (Picture, encode(Picture(np.arange(6.0).reshape(2, 3), "p", Blob(b"xyz")), 1, 5)),
]


@pytest.mark.parametrize("num_messages", [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
@pytest.mark.timeout(1200)
def test_decoding_is_total_for_damaged_messages(num_messages: int) -> None:
    rng = random.Random(0)
    outcomes: Counter[str] = Counter()
    decoders: list[Decoder[Any]] = [Decoder(kind) for kind in (FrontendMessage, EngineMessage, Picture)]
    for _ in range(num_messages):
        kind, frames = rng.choice(FUZZED)
        damaged = [memoryview(frame) for frame in mutate(frames, rng)]
        for decoder in decoders:
            try:
                decoder.decode(damaged)
            except WireError as error:
                outcomes[error.reason] += 1
            else:
                outcomes["message"] += 1
    assert set(outcomes) == {"message", "header", "version", "frames", "body", "payload"}
    for kind, frames in FUZZED:
        assert Decoder[Any](kind).decode(frames).sequence == 5


@pytest.mark.parametrize("kind", ["array", "blob"])
@pytest.mark.parametrize("damage", ["cut", "lost", "empty"])
def test_a_message_without_a_part_of_it_is_never_taken_for_whole(kind: str, damage: str) -> None:
    array, data = np.arange(4, dtype=np.uint8), Blob(b"abcd")
    frames = encode(Picture(array) if kind == "array" else Picture(np.zeros(0), source=data), 1, 1)
    if damage == "lost":
        del frames[-1]
    else:
        frames[-1] = frames[-1][:3] if damage == "cut" else b""
    assert reason_of(Decoder(Picture), frames) == ("frames" if damage == "lost" else "payload")


def test_one_of_two_equal_payloads_is_missed() -> None:
    frames = encode([Picture(np.zeros(3)), Picture(np.ones(3))], 1, 1)
    assert len(Decoder[Any](list[Picture]).decode(frames).message) == 2
    assert reason_of(Decoder(list[Picture]), [*frames[:2], frames[3]]) == "frames"
