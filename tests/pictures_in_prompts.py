"""Prompts with pictures that nobody looks at, and sources of their inputs, for tests of what travels when."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engine_core.config import EngineConfig
from engine_core.engine import EngineCore
from engine_core.runner import MultimodalInfo
from ipc.vocabulary import EngineRequest, ExtraKeySpan, MultimodalFeature, SamplingParams
from tests.fake_runner import FakeRunner

PICTURE_TOKEN = 999
PICTURES = MultimodalInfo(embed_bytes=8)


def key_of(name: str) -> bytes:
    return name.encode().ljust(32, b"\0")


def pictured(
    request_id: str, names: Sequence[str], max_tokens: int = 5, *, picture_tokens: int = 20, input_bytes: int = 4096
) -> EngineRequest:
    """A prompt with the pictures `names`, a token before each."""
    token_ids: list[int] = []
    features, spans = [], []
    for name in names:
        token_ids.append(5)
        start = len(token_ids)
        token_ids += [PICTURE_TOKEN] * picture_tokens
        features.append(MultimodalFeature(key_of(name), start, picture_tokens, ((0, picture_tokens),), input_bytes))
        spans.append(ExtraKeySpan(start, start + picture_tokens, "mm", key_of(name).hex()))
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return EngineRequest(request_id, [*token_ids, 7], params, extra_key_spans=tuple(spans), mm_features=tuple(features))


def inputs_of(key: bytes, input_bytes: int = 4096) -> dict[str, np.ndarray]:
    """Different for every key, `input_bytes` in all."""
    pixels = np.full(input_bytes // 4 - 6, sum(key), dtype=np.float32)
    return {"pixel_values": pixels, "image_grid_thw": np.array([[1, 2, 3]], dtype=np.int64)}


class Pictures:
    """A `FeatureSource`. `asked` counts by key, `failures` are raised for theirs.

    While `ready` is not set, whoever asks waits, and `waiting` has its key.
    """

    def __init__(self, *, input_bytes: int = 4096) -> None:
        self.asked: Counter[bytes] = Counter()
        self.waiting: list[bytes] = []
        self.failures: dict[bytes, BaseException] = {}
        self.ready = asyncio.Event()
        self.ready.set()
        self._input_bytes = input_bytes

    async def inputs(self, key: bytes) -> Mapping[str, np.ndarray]:
        self.asked[key] += 1
        self.waiting.append(key)
        try:
            await self.ready.wait()
        finally:
            self.waiting.remove(key)
        if key in self.failures:
            raise self.failures[key]
        return inputs_of(key, self._input_bytes)


def picture_engine(*, step_s: float = 0.0, **settings: Any) -> EngineCore:
    """An engine without a model that takes pictures."""
    return EngineCore(EngineConfig(**settings), FakeRunner(step_s=step_s, multimodal=PICTURES))
