"""What an engine refuses of pictures: descriptions that are wrong, and what could never be computed here."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from ipc.vocabulary import EngineRequest, ExtraKeySpan, MultimodalFeature

from .config import EngineConfig
from .errors import InvalidRequestError
from .feature_layout import FeatureUnit, feature_units
from .runner import ModelInfo

MIN_KEY_BYTES = 16
MAX_KEY_BYTES = 64
MAX_INPUT_BYTES = 1 << 40
MAX_LAYOUT_NAMES = 16
MAX_LAYOUT_NAME_CHARS = 64
MAX_LAYOUT_NUMBERS = 64
MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class FeatureLimits:
    """What an engine can do with features. `embed_bytes` is 0 where its model takes none.

    `max_joint_tokens` is the most tokens of one request that a step can be relied on to compute, however busy it is.
    """

    model: str
    embed_bytes: int
    joins_touching: bool
    all_at_once: bool
    cache_bytes: int
    max_joint_tokens: int

    @classmethod
    def of(cls, config: EngineConfig, info: ModelInfo, cache_bytes: int) -> FeatureLimits:
        multimodal = info.multimodal
        return cls(
            info.name,
            multimodal.embed_bytes if multimodal else 0,
            multimodal.joins_touching if multimodal else False,
            not config.enable_chunked_prefill,
            cache_bytes,
            config.max_num_batched_tokens - config.max_num_seqs + 1,
        )


def check_features(request: EngineRequest, limits: FeatureLimits) -> tuple[FeatureUnit, ...]:
    """Refuse features that are described wrongly or can never be computed. Returns which are needed together.

    Raises:
        InvalidRequestError: naming the feature and the true numbers.
    """
    features = request.mm_features
    if not features:
        return ()
    if limits.embed_bytes == 0:
        raise _invalid(f"the model {limits.model} takes no pictures, the prompt has {len(features)}")
    end = 0
    described: dict[bytes, int] = {}
    for index, feature in enumerate(features):
        name = f"[{index}]"
        if feature.start < end or feature.end > len(request.prompt_token_ids):
            raise _invalid(
                f"{name} is at tokens [{feature.start}, {feature.end}); it must begin at {end} or later and end within"
                f" the prompt's {len(request.prompt_token_ids)} tokens"
            )
        end = feature.end
        _check_embed_ranges(name, feature)
        _check_description(name, feature)
        first = described.setdefault(feature.key, index)
        _check_same_key(name, feature, first, features[first])
    units = feature_units(features, joins_touching=limits.joins_touching, all_at_once=limits.all_at_once)
    joint = units
    if limits.joins_touching and limits.all_at_once:
        joint = feature_units(features, joins_touching=True, all_at_once=False)
    _check_spans(joint, request.extra_key_spans)
    _check_sizes(units, limits)
    return units


def check_inputs(inputs: Mapping[bytes, Mapping[str, np.ndarray]], features: Iterable[MultimodalFeature]) -> None:
    """Refuse inputs of features that a request does not have, or that are larger than they were said to be.

    Raises:
        InvalidRequestError
    """
    declared_bytes = {feature.key: feature.num_input_bytes for feature in features}
    for key, arrays in inputs.items():
        if key not in declared_bytes:
            raise InvalidRequestError(f"inputs: no feature has the key {key.hex()}", "inputs")
        num_bytes = sum(array.nbytes for array in arrays.values())
        if num_bytes > declared_bytes[key]:
            raise InvalidRequestError(
                f"inputs: those of {key.hex()} have {num_bytes} bytes, {declared_bytes[key]} were declared", "inputs"
            )


def _check_embed_ranges(name: str, feature: MultimodalFeature) -> None:
    end = 0
    for first, last in feature.embed_ranges:
        if first < end or last <= first:
            raise _invalid(f"{name}.embed_ranges: [{first}, {last}) is empty or begins before {end}")
        end = last
    if not feature.embed_ranges or feature.embed_ranges[0][0] != 0 or end != feature.num_tokens:
        raise _invalid(
            f"{name}.embed_ranges: the first and the last of its {feature.num_tokens} tokens must be embedded"
        )


def _check_description(name: str, feature: MultimodalFeature) -> None:
    if feature.modality != "image":
        raise _invalid(f"{name}.modality: must be 'image', is {feature.modality!r}")
    if not MIN_KEY_BYTES <= len(feature.key) <= MAX_KEY_BYTES:
        raise _invalid(f"{name}.key: must have {MIN_KEY_BYTES} … {MAX_KEY_BYTES} bytes, has {len(feature.key)}")
    if not 1 <= feature.num_input_bytes <= MAX_INPUT_BYTES:
        raise _invalid(f"{name}.num_input_bytes: must be in 1 … {MAX_INPUT_BYTES}, is {feature.num_input_bytes}")
    if len(feature.layout) > MAX_LAYOUT_NAMES:
        raise _invalid(f"{name}.layout: has {len(feature.layout)} names, at most {MAX_LAYOUT_NAMES} are allowed")
    for argument, numbers in feature.layout.items():
        if len(argument) > MAX_LAYOUT_NAME_CHARS or len(numbers) > MAX_LAYOUT_NUMBERS:
            raise _invalid(
                f"{name}.layout: a name has at most {MAX_LAYOUT_NAME_CHARS} characters and {MAX_LAYOUT_NUMBERS}"
                f" numbers; {argument[:MAX_LAYOUT_NAME_CHARS]!r} has {len(argument)} and {len(numbers)}"
            )
        if not all(0 <= number <= MAX_INT32 for number in numbers):
            raise _invalid(f"{name}.layout[{argument!r}]: must be in 0 … {MAX_INT32}, is {tuple(numbers)}")


def _check_same_key(name: str, feature: MultimodalFeature, first: int, other: MultimodalFeature) -> None:
    """Features of one key have one encoder output, made once of inputs that come once."""
    for what in ("num_embeds", "num_input_bytes", "layout"):
        here, there = getattr(feature, what), getattr(other, what)
        if here != there:
            raise _invalid(f"{name}.key: is that of [{first}], whose {what} is {there}, here {here}")


def _check_spans(units: Sequence[FeatureUnit], spans: Iterable[ExtraKeySpan]) -> None:
    """Without a span over all that a feature decides, prompts with other pictures would find its blocks."""
    covering = sorted((span.start, MAX_INT32 if span.end is None else span.end) for span in spans if span.kind == "mm")
    starts = [start for start, _ in covering]
    ends = list(accumulate((end for _, end in covering), max))
    for unit in units:
        for feature in unit.features:
            start, end = feature.start, feature.end
            if unit.indivisible:
                start, end = min(start, unit.start), max(end, unit.end)
            place = bisect_right(starts, start)
            if place == 0 or ends[place - 1] < end:
                touching = " (all pictures that touch)" if unit.indivisible else ""
                raise InvalidRequestError(
                    f"extra_key_spans: the picture at tokens [{feature.start}, {feature.end}) needs a span of the kind"
                    f" 'mm' over [{start}, {end}){touching}",
                    "extra_key_spans",
                )


def _check_sizes(units: Sequence[FeatureUnit], limits: FeatureLimits) -> None:
    for unit in units:
        num_tokens = unit.end - unit.start
        if unit.indivisible and num_tokens > limits.max_joint_tokens:
            raise _invalid(
                f"the pictures at tokens [{unit.start}, {unit.end}) touch, so that their {num_tokens} tokens are"
                f" computed in one step; at most {limits.max_joint_tokens} can be"
                " (max_num_batched_tokens - max_num_seqs + 1)"
            )
        num_bytes = limits.embed_bytes * sum({feature.key: feature.num_embeds for feature in unit.features}.values())
        if num_bytes > limits.cache_bytes:
            raise _invalid(
                f"{len(unit.features)} picture(s) at tokens [{unit.start}, {unit.end}), needed together, have"
                f" {num_bytes} bytes when encoded, the encoder cache has {limits.cache_bytes} (encoder_cache_bytes)"
            )


def _invalid(message: str) -> InvalidRequestError:
    separator = "" if message.startswith("[") else ": "
    return InvalidRequestError(f"mm_features{separator}{message}", "mm_features")
