"""A prompt, whatever it was made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from frontend.feature_supply import FeatureSource
from ipc.messages import ExtraKeySpan, MultimodalFeature


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and what they do not say.

    `features` are its pictures by position, `extra_key_spans` what the KV cache must know of them. `inputs` has what
    the model is given of them, for an engine that asks; None without pictures.
    """

    token_ids: list[int]
    features: tuple[MultimodalFeature, ...] = ()
    extra_key_spans: tuple[ExtraKeySpan, ...] = ()
    inputs: FeatureSource | None = None


def num_image_tokens(features: Iterable[MultimodalFeature]) -> int:
    """Tokens of a prompt that stand for its pictures: of each, those from its first embedded one to its last."""
    return sum(feature.num_tokens for feature in features)
