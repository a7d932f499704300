"""Pictures for engines without a model: a number stands for what a picture shows, and decides how large it is."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from engine_core.feature_layout import feature_units
from ipc.vocabulary import ExtraKeySpan, MultimodalFeature

PLACEHOLDER = 1
ROW_BREAK = 2
EMBED_BYTES = 8

_CONTENTS: dict[bytes, int] = {}


def embed_ranges(content: int) -> tuple[tuple[int, int], ...]:
    """One range of 1 … 7 tokens; every third picture has two, with a row break between."""
    num_tokens = 1 + content % 7
    if content % 3 or num_tokens < 2:
        return ((0, num_tokens),)
    return ((0, num_tokens - 1), (num_tokens, num_tokens + 1))


def feature_at(start: int, content: int, tenant: str = "") -> MultimodalFeature:
    ranges = embed_ranges(content)
    key = hashlib.sha256(f"{content}/{tenant}".encode()).digest()
    _CONTENTS[key] = content
    num_embeds = sum(last - first for first, last in ranges)
    return MultimodalFeature(key, start, ranges[-1][1], ranges, num_input_bytes=8 * num_embeds)


def content_of(feature: MultimodalFeature) -> int:
    return _CONTENTS[feature.key]


def pixels(content: int, num_embeds: int) -> np.ndarray:
    return content * 1000 + np.arange(num_embeds)


def inputs_of(feature: MultimodalFeature) -> dict[str, np.ndarray]:
    """What the engine must be given for it."""
    return {"pixels": pixels(content_of(feature), feature.num_embeds)}


def rows_of(values: np.ndarray) -> list[int]:
    """What the encoder makes of pixels."""
    return [hash(("row", int(value))) for value in values]


def true_rows(feature: MultimodalFeature) -> dict[int, int]:
    """By position: what its embedded tokens must be."""
    return placed_rows(feature, rows_of(pixels(content_of(feature), feature.num_embeds)))


def placed_rows(feature: MultimodalFeature, rows: Sequence[int]) -> dict[int, int]:
    positions = [feature.start + place for first, last in feature.embed_ranges for place in range(first, last)]
    return dict(zip(positions, rows, strict=True))


def token_ids_of(content: int) -> list[int]:
    num_tokens = embed_ranges(content)[-1][1]
    token_ids = [ROW_BREAK] * num_tokens
    for first, last in embed_ranges(content):
        token_ids[first:last] = [PLACEHOLDER] * (last - first)
    return token_ids


def mm_spans(features: Sequence[MultimodalFeature], *, joins_touching: bool = False) -> tuple[ExtraKeySpan, ...]:
    """A span for each feature, over all tokens that depend on it."""
    bounds = {id(feature): (feature.start, feature.end) for feature in features}
    if joins_touching:
        for unit in feature_units(features, joins_touching=True, all_at_once=False):
            for feature in unit.features:
                start, end = bounds[id(feature)]
                bounds[id(feature)] = min(start, unit.start), max(end, unit.end)
    return tuple(
        ExtraKeySpan(*bounds[id(feature)], "mm", hashlib.sha256(b"%d" % content_of(feature)).hexdigest())
        for feature in features
    )


def prompt_of(parts: Iterable[Sequence[int] | int], tenant: str = "") -> tuple[list[int], list[MultimodalFeature]]:
    """Token ids and features of a prompt made of text (token ids) and pictures (their content)."""
    token_ids: list[int] = []
    features = []
    for part in parts:
        if isinstance(part, int):
            features.append(feature_at(len(token_ids), part, tenant))
            token_ids += token_ids_of(part)
        else:
            token_ids += part
    return token_ids, features


def inputs_by_key(features: Iterable[MultimodalFeature]) -> Mapping[bytes, Mapping[str, np.ndarray]]:
    return {feature.key: inputs_of(feature) for feature in features}
