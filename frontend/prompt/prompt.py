"""A prompt, whatever it was made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from frontend.feature_supply import FeatureSource
from ipc.vocabulary import ExtraKeySpan, KeepPrefix, MultimodalFeature

from .places import Place, TokenRange


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and what they do not say.

    `features` are its pictures by position, `extra_key_spans` what the KV cache must know of them and of who shares it.
    `inputs` has what the model is given of pictures, for an engine that asks; None without. `places` has those of the
    chat's places that were asked for; `keep` is as in `EngineRequest`.
    """

    token_ids: list[int]
    features: tuple[MultimodalFeature, ...] = ()
    extra_key_spans: tuple[ExtraKeySpan, ...] = ()
    inputs: FeatureSource | None = None
    keep: tuple[KeepPrefix, ...] = ()
    places: Mapping[Place, TokenRange] = field(default_factory=dict)


def num_image_tokens(features: Iterable[MultimodalFeature]) -> int:
    """Tokens of a prompt that stand for its pictures: of each, those from its first embedded one to its last."""
    return sum(feature.num_tokens for feature in features)
