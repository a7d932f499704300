"""Images made to hurt: each is refused, by its header if possible, and never with anything but MediaError."""

from __future__ import annotations

import random
import struct
import time
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from multimodal.errors import MediaError
from multimodal.formats import FORMATS, gif, jpeg, webp
from multimodal.formats import png as png_format
from multimodal.image import ImageLimits, decode_image, image_size
from tests.multimodal.image_files import exif, gif_of_frames, huge_png, noise, png, png_chunk, saved, smooth

LIMITS = ImageLimits()
PNG_HEAD = b"\x89PNG\r\n\x1a\n"


def refusal(encoded: bytes, limits: ImageLimits = LIMITS) -> str:
    with pytest.raises(MediaError) as refused:
        decode_image(encoded, limits)
    return str(refused.value)


# What is no image.


@pytest.mark.parametrize(
    ("encoded", "reason"),
    [
        (b"", "empty"),
        (b"\0", "not an image"),
        (bytes(1000), "not an image"),
        (b"<!DOCTYPE html><html>", "looks like HTML"),
        (b"\n  <svg xmlns='http://www.w3.org/2000/svg'/>", "looks like HTML"),
        (b"%PDF-1.7", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", "not an image"),
        (b"\xc5\xd0\xd3\xc6" + bytes(100), "not an image"),
        (b"8BPS" + bytes(100), "not an image"),
        (b"RIFF\x24\0\0\0WAVEfmt ", "not an image"),
        (b"P6 1 1 255 abc", "not an image"),
    ],
)
def test_only_the_formats_of_the_list_are_read(encoded, reason):
    assert reason in refusal(encoded)
    with pytest.raises(MediaError, match=reason):
        image_size(encoded, LIMITS)


# Larger than it looks.


def test_a_bomb_is_refused_from_its_header():
    bomb = huge_png(50_000, 50_000)
    assert len(bomb) < 2_000_000
    tracemalloc.start()
    assert refusal(bomb).endswith("50000 × 50000 = 2500000000 pixels, more than 67108864")
    with pytest.raises(MediaError, match="too large"):
        image_size(bomb, LIMITS)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 10_000


@pytest.mark.parametrize(("width", "height"), [(65_536, 1), (1, 60_000_000)])
def test_a_thread_of_pixels_is_refused_however_few_they_are(width: int, height: int):
    assert refusal(huge_png(width, height)).endswith(f"{width} × {height} pixels, a side has more than 65535")
    assert image_size(huge_png(65_535, 1), LIMITS) == (1, 65_535)


@pytest.mark.parametrize(
    "encoded",
    [
        png(1, 1, 8, 0, b"\0").replace(struct.pack(">II", 1, 1), struct.pack(">II", 2**31 - 1, 2**31 - 1)),
        b"\xff\xd8\xff\xc0\0\x0b\x08\xff\xff\xff\xff\x01\x01\x11\0\xff\xda\0\x08\x01\x01\0\0\x3f\0",
        b"GIF89a\xff\xff\xff\xff\0\0\0,\0\0\0\0\x01\0\x01\0\0\x02\x02D\x01\0;",
        b"GIF89a\x01\0\x01\0\0\0\0,\xff\xff\xff\xff\x01\0\x01\0\0\x02\x02D\x01\0;",
        b"RIFF\x16\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0\xff\xff\xff\xff\xff\xff",
        b"RIFF\x16\0\0\0WEBPVP8L\x0a\0\0\0\x2f\xff\xff\xff\xff\0\0\0\0\0",
        b"RIFF\x16\0\0\0WEBPVP8 \x0a\0\0\0\0\0\0\x9d\x01\x2a\xff\x3f\xff\x3f",
        b"BM" + bytes(12) + struct.pack("<IIiHHI", 40, 2**31, -(2**31), 1, 24, 0) + bytes(20),
        b"II*\0\x08\0\0\0\x02\0"
        + struct.pack("<HHII", 256, 4, 1, 2**31)
        + struct.pack("<HHII", 257, 4, 1, 2**31)
        + bytes(4),
    ],
    ids=["png", "jpeg", "gif", "gif frame", "webp", "webp lossless", "webp lossy", "bmp", "tiff"],
)
def test_every_format_says_its_size_in_time(encoded):
    assert "too large" in refusal(encoded)


def test_an_image_that_says_two_sizes_is_refused():
    encoded = saved(Image.fromarray(smooth(16, 16)), "JPEG")
    frame = encoded.index(b"\xff\xc0")
    small = encoded[frame : frame + 5] + struct.pack(">HH", 1, 1) + encoded[frame + 9 : frame + 19]
    assert "two sizes" in refusal(encoded[:frame] + small + encoded[frame:], ImageLimits(max_pixels=1))


@pytest.mark.parametrize("size", [(0, 1), (1, 0), (0, 0)])
def test_an_image_without_pixels_is_broken(size):
    one = struct.pack(">II", 1, 1)
    assert "large" in refusal(png(1, 1, 8, 0, b"\0").replace(one, struct.pack(">II", *size)))


# More work than it looks.


def test_an_animation_may_announce_more_frames_than_it_has():
    animated = saved(Image.new("L", (2, 2)), "PNG", save_all=True, append_images=[Image.new("L", (2, 2), 9)])
    assert (
        refusal(animated.replace(b"acTL\0\0\0\x02", b"acTL\xff\xff\xff\xff")) == "the image has more than 1000 frames"
    )


def test_counting_frames_ends_at_the_limit():
    read = []

    class Watched(bytes):
        def __getitem__(self, key):
            read.append(key.start if isinstance(key, slice) else key)
            return super().__getitem__(key)

    encoded = gif_of_frames(10_000)
    assert gif.read_header(Watched(encoded), 10).num_frames == 11
    assert max(read) < len(encoded) // 500


def test_crumbs_of_data_are_refused():
    crumbs = gif_of_frames(1)[:-4] + b"\x01\0" * (gif.MAX_BLOCKS + 1) + b"\0;"
    assert f"more than {gif.MAX_BLOCKS} blocks" in refusal(crumbs)
    chunks = PNG_HEAD + png_chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0))
    assert "chunks" in refusal(chunks + png_chunk(b"IDAT", b"") * (png_format.MAX_CHUNKS + 1))
    assert "chunks" in refusal(saved(Image.new("L", (1, 1)), "WEBP") + b"junk\0\0\0\0" * (webp.MAX_CHUNKS + 1))
    assert "segments" in refusal(b"\xff\xd8" + b"\xff\xe0\0\x02" * (jpeg.MAX_SEGMENTS + 1))


def test_a_jpeg_of_countless_scans_is_refused():
    encoded = saved(Image.fromarray(smooth(16, 16)), "JPEG", progressive=True)
    last = encoded.rindex(b"\xff\xda")
    scan = encoded[last:-2]
    assert decode_image(encoded[:last] + scan * 5 + b"\xff\xd9", LIMITS).shape == (16, 16, 3)
    assert f"more than {jpeg.MAX_SCANS} scans" in refusal(encoded[:last] + scan * jpeg.MAX_SCANS + b"\xff\xd9")


def test_compressed_text_in_a_png_is_never_unpacked():
    bomb = zlib.compress(bytes(50_000_000))
    plain = saved(Image.fromarray(noise(3, 3)), "PNG")
    header_end = 8 + 25
    texts = b"".join(png_chunk(kind, b"a\0\0" + bomb) for kind in (b"zTXt", b"iCCP"))
    tracemalloc.start()
    pixels = decode_image(plain[:header_end] + texts * 5 + plain[header_end:], LIMITS)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert np.array_equal(pixels, noise(3, 3))
    assert peak_bytes < 5_000_000


def tiff(*fields: tuple[int, int, int, int], data: bytes = b"") -> bytes:
    """One page. `data` begins at 1000; fields are (tag, type, number of values, value or offset)."""
    body = (
        struct.pack("<H", len(fields)) + b"".join(struct.pack("<HHII", *field) for field in sorted(fields)) + bytes(4)
    )
    return (b"II*\0\x08\0\0\0" + body).ljust(1000, b"\0") + data


GREY_2X2 = ((256, 4, 1, 2), (257, 4, 1, 2), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (277, 3, 1, 1))


def test_a_tiff_has_no_more_parts_than_pixels_need():
    one_strip = tiff(*GREY_2X2, (273, 4, 1, 1000), (278, 4, 1, 2), (279, 4, 1, 4), data=bytes([1, 2, 3, 4]))
    assert decode_image(one_strip, LIMITS)[:, :, 0].tolist() == [[1, 2], [3, 4]]
    offsets = struct.pack("<I", 1000) * 20_000
    many = tiff(*GREY_2X2, (273, 4, 10_000, 1000), (278, 4, 1, 1), (279, 4, 1, 4), data=offsets)
    assert "10000 parts where 2 are enough" in refusal(many)
    more = tiff(*GREY_2X2, (273, 4, 20_000, 1000), data=offsets)
    assert "field 273 has 20000 values, more than 16384" in refusal(more)
    tile = tiff(*GREY_2X2, (322, 4, 1, 1 << 16), (323, 4, 1, 1 << 16), (324, 4, 1, 1000), (325, 4, 1, 4), data=bytes(4))
    assert "a tile is larger" in refusal(tile)


@pytest.mark.parametrize("compression", [2, 3, 4, 6, 7, 34712, 34925, 50000, 50001, 65000])
def test_tiffs_in_rare_compressions_are_not_read(compression):
    fields = tuple(field for field in GREY_2X2 if field[0] != 259)
    encoded = tiff(*fields, (259, 3, 1, compression), (273, 4, 1, 1000), (279, 4, 1, 4), data=bytes(4))
    assert f"compression {compression} are not read" in refusal(encoded)


@pytest.mark.parametrize("kind", [1, 6, 8, 9, 13])
def test_a_field_of_another_type_does_not_slip_through(kind):
    fields = tuple(field for field in GREY_2X2 if field[0] != 259)
    encoded = tiff(*fields, (259, kind, 1, 7), (273, 4, 1, 1000), (279, 4, 1, 4), data=bytes(4))
    assert (
        "compression 7 are not read" in refusal(encoded)
        if kind == 1
        else "field 259 is not one number" in refusal(encoded)
    )


def test_pages_that_form_a_circle_end():
    first = struct.pack("<H", 1) + struct.pack("<HHII", 256, 4, 1, 1)
    circle = b"II*\0\x08\0\0\0" + first + struct.pack("<I", 8)
    assert "does not say its size" in refusal(circle)


def test_run_length_coded_bitmaps_are_not_read():
    header = struct.pack("<IIiHHI", 40, 8, 8, 1, 8, 1) + bytes(20)
    assert "run-length" in refusal(b"BM" + bytes(12) + header + bytes(100))


@pytest.mark.parametrize("flag", ["LOAD_TRUNCATED_IMAGES"])
def test_a_broken_image_stays_broken_whatever_other_libraries_allow(flag, monkeypatch):
    monkeypatch.setattr(f"PIL.ImageFile.{flag}", True)
    encoded = saved(Image.fromarray(noise(32, 32)), "PNG")
    assert "cut off" in refusal(encoded[:-40])


# Broken.


def files() -> dict[str, bytes]:
    image, grey = Image.fromarray(noise(11, 13)), Image.fromarray(noise(11, 13)[:, :, 0])
    palette = image.quantize(8)
    frames = {"save_all": True, "append_images": [image.transpose(Image.Transpose.ROTATE_180)]}
    return {
        "png": saved(image, "PNG", exif=exif(6)),
        "png palette": saved(palette, "PNG", transparency=2),
        "png alpha": saved(image.convert("RGBA"), "PNG"),
        "png grey 16": png(2, 2, 16, 0, bytes(8), (b"tRNS", b"\0\1")),
        "png animated": saved(image, "PNG", **frames),
        "jpeg": saved(image, "JPEG", exif=exif(6)),
        "jpeg grey": saved(grey, "JPEG"),
        "jpeg progressive": saved(image, "JPEG", progressive=True),
        "jpeg cmyk": saved(image.convert("CMYK"), "JPEG"),
        "mpo": saved(image, "MPO", **frames),
        "gif": saved(palette, "GIF", **frames),
        "gif grey": saved(grey, "GIF", interlace=True),
        "webp": saved(image, "WEBP", exif=exif(6)),
        "webp lossless": saved(image.convert("RGBA"), "WEBP", lossless=True),
        "webp animated": saved(image, "WEBP", **frames),
        "bmp": saved(image, "BMP"),
        "bmp palette": saved(palette, "BMP"),
        "bmp one bit": saved(grey.convert("1"), "BMP"),
        "tiff": saved(image, "TIFF", **frames),
        "tiff lzw": saved(image, "TIFF", compression="tiff_lzw", exif=exif(6)),
        "tiff packbits": saved(grey, "TIFF", compression="packbits"),
        "tiff deflate palette": saved(palette, "TIFF", compression="tiff_adobe_deflate"),
        "tiff float": saved(grey.convert("F"), "TIFF"),
        "tiff big": saved(image, "TIFF", big_tiff=True),
    }


FILES = files()
SMALL = ImageLimits(max_pixels=1 << 14, max_frames=8)


def check(encoded: bytes) -> np.ndarray | None:
    """Pixels of the promised size, or MediaError; anything else fails."""
    try:
        size = image_size(encoded, SMALL)
    except MediaError:
        with pytest.raises(MediaError):
            decode_image(encoded, SMALL)
        return None
    try:
        pixels = decode_image(encoded, SMALL)
    except MediaError:
        return None
    assert pixels.shape == (*size, 3)
    assert pixels.dtype == np.uint8
    return pixels


def test_the_seeds_of_the_fuzzing_are_sound_and_of_every_format():
    assert all(check(encoded) is not None for encoded in FILES.values())
    assert all(any(image_format.starts(encoded) for encoded in FILES.values()) for image_format in FORMATS)


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_off_anywhere_is_an_error_or_the_whole_image(name, recwarn):
    encoded = FILES[name]
    whole = check(encoded)
    accepted = [length for length in range(len(encoded)) if check(encoded[:length]) is not None]
    if name.startswith("png"):
        assert not accepted
    assert all(np.array_equal(check(encoded[:length]), whole) for length in accepted), "what is missing is not shown"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("seed", range(2))
def test_a_file_changed_anywhere_is_an_error_or_an_image(name, seed, recwarn, capfd):
    rng = random.Random(f"{name} {seed}")
    for _ in range(150):
        check(changed(bytearray(FILES[name]), rng))
    assert not recwarn.list, "nothing is said in a log"
    assert capfd.readouterr().err.count("\n") <= 150, "libtiff does, once for a file"


def changed(data: bytearray, rng: random.Random) -> bytes:
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        # Most of what can go wrong is decided in the first bytes.
        position = rng.randrange(min(len(data), rng.choice([64, 256, len(data)])))
        match rng.randrange(5):
            case 0:
                data[position] = rng.randrange(256)
            case 1:
                data[position] ^= 1 << rng.randrange(8)
            case 2:
                number = rng.choice([0, 1, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
                data[position : position + 4] = struct.pack(rng.choice("<>") + "I", number)
            case 3:
                del data[position : position + rng.randrange(1, 9)]
            case 4:
                start = rng.randrange(len(data))
                data[position:position] = data[start : start + rng.randrange(1, 65)]
        data = data or bytearray(1)
    return bytes(data)


@given(
    st.sampled_from(
        [b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"RIFF\x40\0\0\0WEBP", b"BM", b"II*\0", b"MM\0+"]
    ),
    st.binary(max_size=200),
)
def test_a_signature_and_anything_after_it_is_an_error_or_an_image(signature, rest):
    check(signature + rest)


def test_the_checksums_of_a_png_count():
    encoded = FILES["png"]
    position = encoded.index(b"IDAT") + 20
    flipped = encoded[:position] + bytes([encoded[position] ^ 1]) + encoded[position + 1 :]
    assert "checksum of its IDAT is wrong" in refusal(flipped)


def test_the_worst_headers_take_no_time_to_speak_of():
    """Compared with decoding an ordinary picture, since no clock can be trusted."""
    ordinary = saved(Image.fromarray(noise(1024, 1024)), "PNG", compress_level=1)
    start_s = time.process_time()
    decode_image(ordinary, LIMITS)
    ordinary_s = time.process_time() - start_s
    padding = b"\xff" * (32 << 20)
    for worst in (
        b"\xff\xd8" + padding,
        gif_of_frames(1)[:-1] + b"!\xff\x01a" * (gif.MAX_BLOCKS // 2),
        b"II*\0\x08\0\0\0" + padding,
        PNG_HEAD + padding,
    ):
        start_s = time.process_time()
        check(worst)
        assert time.process_time() - start_s < 100 * ordinary_s
