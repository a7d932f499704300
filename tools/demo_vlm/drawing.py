"""A scene → pixels, and what each patch of them shows: the labels that the vision tower is warmed up on."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from random import Random

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from .scenes import COLOUR_NAMES, COLOURS, DIGITS, KINDS, SIDE, Scene, Thing

PATCH = 8
GRID = SIDE // PATCH
NUM_PATCHES = GRID * GRID

IGNORED = -1
_SUPERSAMPLING = 4
_MIN_CONTRAST = 120.0
_MIN_COVERAGE, _FULL_COVERAGE = 0.06, 0.22


@dataclass(frozen=True, slots=True)
class Labels:
    """Per patch, `[NUM_PATCHES]` each: kind and colour of the thing that covers it (0: none, `IGNORED`: too thinly),
    whether its centre lies here, and `box` `[NUM_PATCHES, 4]`: that thing's x, y, width, height as shares of the side.
    """

    kind: np.ndarray
    colour: np.ndarray
    is_centre: np.ndarray
    box: np.ndarray


def draw(random: Random, scene: Scene, scale: int = 1, *, plain: bool = False) -> tuple[np.ndarray, Labels]:
    """`[SIDE × scale, SIDE × scale, 3]` uint8. `plain` leaves out texture, noise and blur."""
    side = SIDE * scale
    noise = np.random.default_rng(random.getrandbits(32))
    background = _shade(random, scene.background)
    canvas = np.empty((side, side, 3), np.float32)
    canvas[:] = background
    if not plain:
        canvas += _texture(random, noise, scene.background, side)[..., None]
    labels = Labels(
        np.zeros(NUM_PATCHES, np.int8),
        np.zeros(NUM_PATCHES, np.int8),
        np.zeros(NUM_PATCHES, np.int8),
        np.zeros((NUM_PATCHES, 4), np.float16),
    )
    for thing in scene.things:
        colour = _contrasting(random, thing.colour, background)
        alpha = _mask(random, thing, side)
        if random.random() < 0.08 and thing.kind not in DIGITS and thing.size > 18 and not plain:
            canvas = canvas * (1 - alpha) + colour * 0.65 * alpha
            inner = _shrunk(alpha, thing, side)
            canvas = canvas * (1 - inner) + colour * inner
        else:
            canvas = canvas * (1 - alpha) + colour * alpha
        _label(labels, thing, alpha[..., 0])
    if not plain and random.random() < 0.5:
        canvas = canvas + noise.normal(0, random.uniform(0.5, 6), canvas.shape)
    pixels = np.clip(canvas, 0, 255).astype(np.uint8)
    if not plain and random.random() < 0.2:
        blur = ImageFilter.GaussianBlur(random.uniform(0.3, 0.8) * scale)
        pixels = np.asarray(Image.fromarray(pixels).filter(blur))
    return pixels, labels


def _shade(random: Random, name: str) -> np.ndarray:
    jitter = 4 if name in {"white", "black"} else 10
    return np.clip([value + random.uniform(-jitter, jitter) for value in random.choice(COLOURS[name])], 0, 255)


def _contrasting(random: Random, name: str, background: np.ndarray) -> np.ndarray:
    for _ in range(30):
        colour = _shade(random, name)
        if np.abs(colour - background).sum() > _MIN_CONTRAST:
            break
    return colour


def _texture(random: Random, noise: np.random.Generator, name: str, side: int) -> np.ndarray:
    strength = 7.0 if name in {"white", "black"} else 16.0
    kind = random.random()
    if kind < 0.2:
        slope = np.linspace(-strength, strength, side, dtype=np.float32)
        return slope[:, None] * random.uniform(-1, 1) + slope[None] * random.uniform(-1, 1)
    if kind < 0.35:
        blotches = Image.fromarray(noise.normal(0, 1, (8, 8)).astype(np.float32))
        return np.asarray(blotches.resize((side, side), Image.Resampling.BICUBIC)) * strength * 0.6
    return np.zeros((side, side), np.float32)


def _mask(random: Random, thing: Thing, side: int) -> np.ndarray:
    """Coverage of each pixel, `[side, side, 1]` in [0, 1]."""
    scale = side / SIDE * _SUPERSAMPLING
    mask = Image.new("L", (side * _SUPERSAMPLING, side * _SUPERSAMPLING))
    if thing.kind in DIGITS:
        glyph = _glyph(random.randrange(4), thing.kind)
        width = thing.width * min(1.0, max(0.35, glyph.width / glyph.height)) * random.uniform(0.9, 1.1)
        glyph = glyph.resize((max(2, int(width * scale)), max(2, int(thing.height * scale))), Image.Resampling.BILINEAR)
        if random.random() < 0.4:
            glyph = glyph.rotate(random.uniform(-10, 10), Image.Resampling.BILINEAR, expand=True)
        mask.paste(glyph, (int(thing.x * scale - glyph.width / 2), int(thing.y * scale - glyph.height / 2)))
    else:
        points = _turned(_outline(random, thing.kind), _angle(random, thing.kind))
        ImageDraw.Draw(mask).polygon(
            [((thing.x + x * thing.width / 2) * scale, (thing.y + y * thing.height / 2) * scale) for x, y in points],
            fill=255,
        )
    hard = random.random() < 0.15
    mask = mask.resize((side, side), Image.Resampling.NEAREST if hard else Image.Resampling.BOX)
    return np.asarray(mask, np.float32)[..., None] / 255


def _shrunk(alpha: np.ndarray, thing: Thing, side: int) -> np.ndarray:
    """The same form at 80 % of its size, around the thing's centre."""
    centre_x, centre_y = thing.x * side / SIDE, thing.y * side / SIDE
    image = Image.fromarray((alpha[..., 0] * 255).astype(np.uint8))
    grow = 1 / 0.8
    inner = image.transform(
        image.size,
        Image.Transform.AFFINE,
        (grow, 0, centre_x * (1 - grow), 0, grow, centre_y * (1 - grow)),
        Image.Resampling.BILINEAR,
    )
    return np.asarray(inner, np.float32)[..., None] / 255


def _angle(random: Random, kind: str) -> float:
    if kind == "circle" or random.random() < 0.5:
        return 0.0
    return math.radians(random.uniform(-10, 10) if kind in {"square", "cross"} else random.uniform(-18, 18))


def _turned(points: list[tuple[float, float]], angle: float) -> list[tuple[float, float]]:
    cos, sin = math.cos(angle), math.sin(angle)
    return [(x * cos - y * sin, x * sin + y * cos) for x, y in points]


def _outline(random: Random, kind: str) -> list[tuple[float, float]]:
    """A polygon in [-1, 1]², y downwards."""
    turn = np.linspace(0, 2 * math.pi, 40, endpoint=False)
    if kind == "circle":
        return [(math.cos(t), math.sin(t)) for t in turn]
    if kind == "square":
        return [(-0.92, -0.92), (0.92, -0.92), (0.92, 0.92), (-0.92, 0.92)]
    if kind == "triangle":
        up = [(random.uniform(-0.15, 0.15), -1.0), (1.0, 0.85), (-1.0, 0.85)]
        return [(x, -y) for x, y in up] if random.random() < 0.1 else up
    if kind == "star":
        inner = random.uniform(0.38, 0.5)
        radii = [1.0, inner] * 5
        return [(r * math.sin(i * math.pi / 5), -r * math.cos(i * math.pi / 5)) for i, r in enumerate(radii)]
    if kind == "cross":
        arm = random.uniform(0.24, 0.38)
        corner = [(-arm, -1.0), (arm, -1.0), (arm, -arm)]
        quarters = [corner]
        for _ in range(3):
            quarters.append([(-y, x) for x, y in quarters[-1]])
        return [point for quarter in quarters for point in quarter]
    heart_x = 16 * np.sin(turn) ** 3
    heart_y = -(13 * np.cos(turn) - 5 * np.cos(2 * turn) - 2 * np.cos(3 * turn) - np.cos(4 * turn))
    return list(zip((heart_x / 16.5).tolist(), ((heart_y - 2.5) / 15).tolist(), strict=True))


@functools.cache
def _glyph(weight: int, digit: str) -> Image.Image:
    # Pillow's own font: the same on every machine.
    image = Image.new("L", (260, 260))
    font = ImageFont.load_default(150)
    ImageDraw.Draw(image).text((60, 30), digit, font=font, fill=255, stroke_width=4 * weight, stroke_fill=255)
    return image.crop(image.getbbox())


def _label(labels: Labels, thing: Thing, alpha: np.ndarray) -> None:
    step = alpha.shape[0] // GRID
    coverage = alpha.reshape(GRID, step, GRID, step).mean((1, 3)).reshape(-1)
    row, column = min(GRID - 1, int(thing.y // PATCH)), min(GRID - 1, int(thing.x // PATCH))
    centre = row * GRID + column
    labels.is_centre[centre] = 1
    # A ring's centre is empty, and still it is where the thing is.
    coverage[centre] = max(coverage[centre], _FULL_COVERAGE)
    touched = coverage > _MIN_COVERAGE
    full = coverage >= _FULL_COVERAGE
    for label, value in ((labels.kind, KINDS.index(thing.kind)), (labels.colour, COLOUR_NAMES.index(thing.colour))):
        label[touched & ~full & (label == 0)] = IGNORED
        label[full] = value + 1
    labels.box[full] = np.array([thing.x, thing.y, thing.width, thing.height]) / SIDE
