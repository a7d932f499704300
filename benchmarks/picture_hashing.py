"""What a picture's content hash costs, beside processing it: `python -m benchmarks.picture_hashing`.

The picture is random (nothing in it repeats) and decoded already. "Processing" is making model inputs of it with
transformers' own PIL image processor of Qwen2-VL. Both in one thread, alternating, the fastest of all rounds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import numpy as np

from multimodal.content_hash import ContentHasher

# transformers would load it, and the frontend keeps it out as well.
sys.modules["torch"] = None  # type: ignore[assignment]

SHA256_TARGET = 0.10


def seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def hashers() -> dict[str, ContentHasher]:
    made = {"sha256": ContentHasher(), "xxhash": ContentHasher("xxhash", seed="benchmark")}
    try:
        made["blake3"] = ContentHasher("blake3")
    except ValueError as error:
        print(error, file=sys.stderr)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", type=int, default=1024, help="of the square picture, in pixels")
    parser.add_argument("--rounds", type=int, default=11)
    arguments = parser.parse_args()

    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil()
    side = arguments.side
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)

    def content_hash(hasher: ContentHasher) -> bytes:
        digest = hasher.pixels(pixels)
        return hasher.content(digest, options={"detail": "auto"}, fingerprint="qwen2_vl")

    works: dict[str, Callable[[], object]] = {"processing": lambda: processor(images=[pixels])}
    for algo, hasher in hashers().items():
        works[algo] = lambda hasher=hasher: content_hash(hasher)  # type: ignore[misc]
    fastest = dict.fromkeys(works, float("inf"))
    for _ in range(arguments.rounds):
        for name, work in works.items():
            fastest[name] = min(fastest[name], seconds_of(work))

    print(f"a decoded {side} x {side} picture, {pixels.nbytes / 1e6:.1f} MB")
    for name, seconds in fastest.items():
        print(f"{name:12} {seconds * 1e3:8.2f} ms  {seconds / fastest['processing']:7.2%} of processing")
    return 0 if fastest["sha256"] < SHA256_TARGET * fastest["processing"] else 1


if __name__ == "__main__":
    sys.exit(main())
