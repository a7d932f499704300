"""Decoding: one canonical form of the pixels, whatever an image is stored as."""

from __future__ import annotations

import io
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from multimodal.canonical_rgb import BLOCK_PIXELS, to_rgb
from multimodal.errors import MediaError
from multimodal.image import ImageLimits, decode_image, image_size
from tests.multimodal.image_files import exif, gif_of_frames, noise, png, png_chunk, saved, smooth

LIMITS = ImageLimits()


def decoded(encoded: bytes) -> np.ndarray:
    pixels = decode_image(encoded, LIMITS)
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    assert pixels.shape == (*image_size(encoded, LIMITS), 3)
    return pixels


def row(encoded: bytes) -> list[list[int]]:
    """The pixels of an image that is one pixel high."""
    return decoded(encoded)[0].tolist()


def greys(*values: int) -> list[list[int]]:
    return [[value] * 3 for value in values]


# Formats.


@pytest.mark.parametrize(
    ("file_format", "options"),
    [
        ("PNG", {}),
        ("WEBP", {"lossless": True}),
        ("BMP", {}),
        ("TIFF", {}),
        ("TIFF", {"big_tiff": True}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("TIFF", {"compression": "tiff_adobe_deflate"}),
        ("TIFF", {"compression": "tiff_deflate"}),
        ("TIFF", {"compression": "packbits"}),
    ],
)
@pytest.mark.parametrize("size", [(1, 1), (1, 37), (53, 1), (30, 100), (100, 30)])
def test_a_picture_is_the_same_in_every_format_that_keeps_it(file_format, options, size):
    pixels = noise(*size)
    assert np.array_equal(decoded(saved(Image.fromarray(pixels), file_format, **options)), pixels)


@pytest.mark.parametrize(
    ("file_format", "options"),
    [
        ("JPEG", {"quality": 95}),
        ("JPEG", {"quality": 95, "progressive": True}),
        ("JPEG", {"quality": 95, "optimize": True, "subsampling": 0}),
        ("MPO", {"quality": 95, "save_all": True, "append_images": [Image.new("RGB", (9, 9))]}),
        ("WEBP", {"quality": 95}),
        ("GIF", {}),
    ],
)
def test_a_picture_is_nearly_the_same_in_every_other_format(file_format, options):
    pixels = smooth(48, 64)
    seen = decoded(saved(Image.fromarray(pixels), file_format, **options)).astype(int)
    assert np.abs(seen - pixels).mean() < 12


def test_a_picture_of_more_than_one_block_is_whole():
    for height, width in ((3, BLOCK_PIXELS + 5), (1000, 700)):
        pixels = np.resize(noise(7, 11), (height, width, 3))
        assert np.array_equal(to_rgb(Image.fromarray(pixels)), pixels)


def test_profiles_texts_and_thumbnails_change_nothing():
    image = Image.fromarray(smooth(20, 30))
    thumbnail = Image.Exif()
    thumbnail[305] = "a camera"
    extras = {"icc_profile": b"no profile at all", "exif": thumbnail.tobytes()}
    for file_format in ("PNG", "JPEG", "WEBP", "TIFF"):
        plain, full = saved(image, file_format), saved(image, file_format, **extras)
        assert len(full) > len(plain)
        assert np.array_equal(decoded(full), decoded(plain))


# Kinds of pixels. A grey, its three channels and so on are exact.


def test_one_bit():
    assert row(saved(Image.fromarray(np.array([[True, False, True]])), "PNG")) == greys(255, 0, 255)


@pytest.mark.parametrize(
    ("depth", "byte", "seen"), [(1, 0b01000000, (0, 255)), (2, 0b01100000, (85, 170)), (4, 0x1E, (17, 238))]
)
def test_grey_of_few_bits_is_scaled(depth, byte, seen):
    assert row(png(2, 1, depth, 0, bytes([byte]))) == greys(*seen)


@pytest.mark.parametrize(
    ("depth", "byte", "key", "seen"),
    [
        (1, 0b01000000, 1, (0, 255)),
        (1, 0b01000000, 0, (255, 255)),
        (2, 0b01100000, 1, (255, 170)),
        (4, 0x1E, 14, (17, 255)),
    ],
)
def test_a_transparent_grey_is_white(depth, byte, key, seen):
    assert row(png(2, 1, depth, 0, bytes([byte]), (b"tRNS", struct.pack(">H", key)))) == greys(*seen)


def test_a_transparent_grey_of_8_and_16_bits():
    assert row(png(2, 1, 8, 0, bytes([7, 8]), (b"tRNS", b"\0\x07"))) == greys(255, 8)
    assert row(png(2, 1, 8, 0, bytes([7, 8]), (b"tRNS", b"\x55\x07"))) == greys(255, 8)  # only 8 bits of it count
    assert row(png(2, 1, 16, 0, bytes([7, 0, 7, 1]), (b"tRNS", b"\x07\x01"))) == greys(7, 255)


def test_a_transparent_color():
    colors = bytes([1, 2, 3, 1, 2, 4])
    assert row(png(2, 1, 8, 2, colors, (b"tRNS", struct.pack(">3H", 1, 2, 3)))) == [[255] * 3, [1, 2, 4]]
    assert row(saved(Image.frombytes("RGB", (2, 1), colors), "PNG", transparency=(1, 2, 4))) == [[1, 2, 3], [255] * 3]


def test_16_bits_are_scaled_and_not_clipped():
    values = [0, 127, 128, 129, 256, 257, 32768, 65279, 65407, 65408, 65535]
    expected = greys(*(round(value / 257) for value in values))
    assert expected[-1] == [255] * 3
    pixels = np.array([values], np.uint16)
    for byte_order, mode in (("<", "I;16"), (">", "I;16B")):
        image = Image.frombytes(mode, (len(values), 1), pixels.astype(byte_order + "u2").tobytes())
        assert to_rgb(image)[0].tolist() == expected
        assert row(saved(image, "TIFF")) == expected
    assert to_rgb(Image.frombytes("I;16L", (len(values), 1), pixels.astype("<u2").tobytes()))[0].tolist() == expected
    assert row(png(len(values), 1, 16, 0, pixels.astype(">u2").tobytes())) == expected


def test_colors_of_16_bits_are_scaled():
    colors = np.array([0, 255, 256, 32768, 65280, 65535], ">u2").tobytes()
    assert row(png(2, 1, 16, 2, colors)) == [[0, 0, 1], [128, 255, 255]]
    assert row(png(2, 1, 16, 2, colors, (b"tRNS", colors[:6]))) == [[255] * 3, [128, 255, 255]]


@pytest.mark.parametrize(
    ("values", "seen"),
    [
        ([0, 257, 65535], [0, 1, 255]),
        ([0, 300], [0, 1]),
        ([0, 65536], [0, 255]),
        ([-100, 0, 100], [0, 128, 255]),
        ([100_000, 200_000, 300_000], [0, 128, 255]),
        ([-(2**31), 2**31 - 1], [0, 255]),
    ],
)
def test_32_bits_are_scaled_by_the_first_range_that_holds_them(values, seen):
    image = Image.fromarray(np.array([values], np.int32))
    assert image.mode == "I"
    assert row(saved(image, "TIFF")) == greys(*seen)


@pytest.mark.parametrize(
    ("values", "seen"),
    [
        ([0.0, 0.5, 1.0], [0, 128, 255]),
        ([0.0, 1.5, 254.6, 255.0], [0, 2, 255, 255]),
        ([0.0, 257.0, 65535.0], [0, 1, 255]),
        ([-1.0, 0.0, 1.0], [0, 128, 255]),
        ([1e30, 2e30, 3e30], [0, 128, 255]),
        ([0.0, np.nan, 1.0], [0, 0, 255]),
        ([0.25, np.inf, -np.inf], [64, 255, 0]),
        ([np.nan, np.nan], [0, 0]),
    ],
)
def test_floats_are_scaled_by_the_first_range_that_holds_them(values, seen):
    image = Image.fromarray(np.array([values], np.float32))
    assert image.mode == "F"
    assert row(saved(image, "TIFF")) == greys(*seen)


def on_white(color: int, alpha: int) -> int:
    return int((color * alpha + 255 * (255 - alpha)) / 255 + 0.5)


@pytest.mark.parametrize("color", [0, 1, 127, 254, 255])
def test_alpha_is_composited_on_white_exactly(color):
    alphas = list(range(256))
    expected = greys(*(on_white(color, alpha) for alpha in alphas))
    grey = Image.fromarray(np.array([[[color, alpha] for alpha in alphas]], np.uint8), "LA")
    rgba = Image.fromarray(np.array([[[color, color, color, alpha] for alpha in alphas]], np.uint8), "RGBA")
    for image in (grey, rgba):
        assert row(saved(image, "PNG")) == expected
    assert row(saved(rgba, "WEBP", lossless=True, exact=True)) == expected
    assert row(saved(rgba, "TIFF")) == expected


def test_alpha_of_16_bits():
    samples = np.array([0x1200, 0x3400, 0x5600, 0xFFFF, 0, 0, 0, 0], ">u2").tobytes()
    assert row(png(2, 1, 16, 6, samples)) == [[0x12, 0x34, 0x56], [255] * 3]
    assert row(png(2, 1, 16, 4, samples[2:4] + b"\xff\xff" + samples[:2] + b"\0\0")) == greys(0x34, 255)


def test_premultiplied_alpha_is_undone():
    for plain, premultiplied in (("LA", "La"), ("RGBA", "RGBa")):
        image = Image.new(plain, (2, 1), (200, 128) if plain == "LA" else (200, 100, 0, 128))
        assert np.abs(to_rgb(image.convert(premultiplied)).astype(int) - to_rgb(image)).max() <= 1


PALETTE = bytes([10, 20, 30, 40, 50, 60, 70, 80, 90])


@pytest.mark.parametrize("depth", [2, 4, 8])
def test_palettes(depth):
    indices = {2: bytes([0b00011000]), 4: bytes([0x01, 0x20]), 8: bytes([0, 1, 2])}[depth]
    colors = [[10, 20, 30], [40, 50, 60], [70, 80, 90]]
    assert row(png(3, 1, depth, 3, indices, (b"PLTE", PALETTE))) == colors
    with_alpha = png(3, 1, depth, 3, indices, (b"PLTE", PALETTE), (b"tRNS", bytes([255, 0])))
    assert row(with_alpha) == [colors[0], [255] * 3, colors[2]]
    half = png(3, 1, depth, 3, indices, (b"PLTE", PALETTE), (b"tRNS", bytes([255, 128])))
    assert row(half) == [colors[0], [on_white(color, 128) for color in colors[1]], colors[2]]


def test_palettes_with_alpha_in_memory():
    image = Image.new("RGBA", (1, 1), (10, 20, 30, 128)).convert("PA")
    assert to_rgb(image).tolist() == [[[on_white(color, 128) for color in (10, 20, 30)]]]


def test_transparency_in_a_gif():
    image = Image.frombytes("P", (2, 1), bytes([0, 1]))
    image.putpalette(PALETTE)
    assert row(saved(image, "GIF", transparency=1)) == [[10, 20, 30], [255] * 3]


def test_cmyk_in_both_polarities():
    image = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    assert (decoded(saved(image, "TIFF")) == [255, 0, 0]).all()
    assert np.abs(decoded(saved(image, "JPEG", quality=100)).astype(int) - [255, 0, 0]).max() <= 3


def test_what_adobe_says_of_the_colors_of_a_jpeg_counts():
    """Its marker may say that the components are RGB; without it they would be taken for YCbCr."""
    encoded = saved(Image.fromarray(smooth(16, 16)), "JPEG")
    assert encoded[2:4] == b"\xff\xe0"
    rgb = encoded[:2] + b"\xff\xee\0\x0eAdobe\0\x64\0\0\0\0\0" + encoded[20:]
    assert np.array_equal(decoded(rgb), np.asarray(Image.open(io.BytesIO(rgb))))
    assert not np.array_equal(decoded(rgb), decoded(encoded))


@pytest.mark.parametrize("mode", ["YCbCr", "HSV", "RGBX"])
def test_other_color_spaces_are_as_pillow_converts_them(mode):
    image = Image.fromarray(noise(5, 7)).convert(mode)
    assert np.array_equal(to_rgb(image), np.asarray(image.convert("RGB")))
    if mode == "YCbCr":
        assert np.array_equal(decoded(saved(image, "TIFF")), np.asarray(image.convert("RGB")))


def test_lab():
    lab = Image.frombytes("LAB", (2, 1), bytes([255, 0, 0, 0, 0, 0]))  # a and b are signed
    assert np.abs(np.array(row(saved(lab, "TIFF"))) - [[255] * 3, [0] * 3]).max() <= 2


# Orientation.


def stored_as(shown: np.ndarray, orientation: int) -> np.ndarray:
    """What a camera stores that says this orientation, for this to be seen: found by trying all eight."""
    for turned in (shown, shown.transpose(1, 0, 2)):
        for flipped in (turned, turned[::-1], turned[:, ::-1], turned[::-1, ::-1]):
            tagged = Image.open(
                io.BytesIO(saved(Image.fromarray(np.ascontiguousarray(flipped)), "PNG", exif=exif(orientation)))
            )
            if np.array_equal(np.asarray(ImageOps.exif_transpose(tagged)), shown):
                return np.ascontiguousarray(flipped)
    raise AssertionError(orientation)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(("file_format", "options"), [("PNG", {}), ("WEBP", {"lossless": True}), ("TIFF", {})])
def test_an_image_is_turned_as_its_exif_block_says(file_format, options, orientation):
    shown = noise(3, 5)
    image = Image.fromarray(stored_as(shown, orientation))
    assert np.array_equal(decoded(saved(image, file_format, exif=exif(orientation), **options)), shown)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_jpeg_is_turned_like_any_other(orientation):
    image = Image.fromarray(smooth(24, 40))
    oracle = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(saved(image, "JPEG", exif=exif(orientation))))))
    assert np.array_equal(decoded(saved(image, "JPEG", exif=exif(orientation))), oracle)


def test_an_exif_block_behind_the_pixels_counts_too():
    encoded = saved(Image.fromarray(noise(3, 5)), "PNG")
    late = encoded[:-12] + png_chunk(b"eXIf", exif(6).removeprefix(b"Exif\0\0")) + encoded[-12:]
    assert decoded(late).shape == (5, 3, 3)


@pytest.mark.parametrize(
    "block",
    [
        b"",
        b"Exif\0\0",
        b"Exif\0\0II*\0",
        b"Exif\0\0" + b"\xff" * 40,
        exif(6)[:-9],
        exif(9),
        exif(0),
        b"Exif\0\0MM\0*\0\0\0\x08\xff\xff",
    ],
)
def test_a_broken_exif_block_is_ignored(block):
    image = Image.fromarray(smooth(16, 24))
    for file_format in ("PNG", "JPEG", "WEBP"):
        plain = saved(image, file_format)
        assert np.array_equal(decoded(saved(image, file_format, exif=block)), decoded(plain))


def test_twins_differ_where_their_pixels_do_and_only_there():
    indices = bytes([0, 1, 2, 1])
    one, other = png(4, 1, 8, 3, indices, (b"PLTE", PALETTE)), png(4, 1, 8, 3, indices, (b"PLTE", PALETTE[::-1]))
    assert not np.array_equal(decoded(one), decoded(other))
    renumbered = png(4, 1, 8, 3, bytes([2, 1, 0, 1]), (b"PLTE", PALETTE[6:] + PALETTE[3:6] + PALETTE[:3]))
    assert np.array_equal(decoded(one), decoded(renumbered))
    upright = Image.fromarray(noise(4, 4))
    assert not np.array_equal(decoded(saved(upright, "PNG")), decoded(saved(upright, "PNG", exif=exif(6))))
    turned = upright.transpose(Image.Transpose.ROTATE_90)
    assert np.array_equal(decoded(saved(upright, "PNG")), decoded(saved(turned, "PNG", exif=exif(6))))


# Several frames.


def test_of_an_animation_the_first_frame_is_seen():
    frames = [Image.new("RGB", (6, 4), color) for color in ("red", "blue", "green")]
    for file_format in ("GIF", "PNG", "WEBP", "TIFF"):
        options = {"lossless": True} if file_format == "WEBP" else {}
        animation = saved(frames[0], file_format, save_all=True, append_images=frames[1:], **options)
        assert (decoded(animation) == [255, 0, 0]).all()
        with pytest.raises(MediaError, match="more than 2 frames"):
            decode_image(animation, ImageLimits(max_frames=2))
        with pytest.raises(MediaError, match="more than 2 frames"):
            image_size(animation, ImageLimits(max_frames=2))
        assert image_size(animation, ImageLimits(max_frames=3)) == (4, 6)


def test_of_ten_thousand_frames_only_the_first_is_decoded():
    assert row(gif_of_frames(1000)) == [[255, 0, 0]]
    with pytest.raises(MediaError, match="more than 1000 frames"):
        decode_image(gif_of_frames(10_000), LIMITS)
    assert decode_image(gif_of_frames(10_000), ImageLimits(max_frames=10_000))[0].tolist() == [[255, 0, 0]]


# The public face.


@pytest.mark.parametrize("values", [{"max_pixels": 0}, {"max_frames": 0}])
def test_limits_are_positive(values):
    with pytest.raises(ValueError):
        ImageLimits(**values)


@given(st.integers(1, 40), st.integers(1, 40))
def test_the_pixel_limit_is_exact(height, width):
    encoded = saved(Image.new("L", (width, height)), "PNG")
    assert image_size(encoded, ImageLimits(max_pixels=height * width)) == (height, width)
    if height * width > 1:
        with pytest.raises(MediaError, match=f"{width} × {height} = {width * height} pixels"):
            image_size(encoded, ImageLimits(max_pixels=height * width - 1))


def test_decoding_needs_neither_torch_nor_pillows_other_formats():
    program = """
import sys
from multimodal import image, media
from PIL import Image
print("torch" in sys.modules, sorted(Image.OPEN), Image.MAX_IMAGE_PIXELS)
"""
    seen = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert seen.startswith("False")
    assert not {"EPS", "PDF", "WMF", "PCD"} & set(seen.split("'"))
    assert f" {Image.MAX_IMAGE_PIXELS}" in seen, "what other libraries rely on is as it was"
