"""Draw the pictures that the README and the model card ask about: `python -m tools.draw_sample_pictures`."""

from __future__ import annotations

from pathlib import Path
from random import Random

from PIL import Image

from tools.demo_vlm.drawing import draw
from tools.demo_vlm.scenes import Scene, Thing

DIRECTORY = Path(__file__).parents[1] / "docs" / "pictures"
SAMPLES = {
    "star_and_seven": Scene("white", (Thing("star", "red", 17, 18, 26, 26), Thing("7", "blue", 47, 46, 24, 26))),
    "three_shapes": Scene(
        "black",
        (
            Thing("heart", "purple", 14, 46, 20, 20),
            Thing("circle", "yellow", 33, 16, 24, 24),
            Thing("square", "green", 51, 47, 18, 18),
        ),
    ),
    "two_triangles": Scene(
        "yellow", (Thing("triangle", "blue", 18, 32, 28, 28), Thing("triangle", "red", 47, 32, 22, 22))
    ),
}
_SCALE = 5


def main() -> None:
    DIRECTORY.mkdir(exist_ok=True)
    for seed, (name, scene) in enumerate(SAMPLES.items()):
        pixels, _ = draw(Random(seed), scene, _SCALE, plain=True)
        Image.fromarray(pixels).save(DIRECTORY / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
