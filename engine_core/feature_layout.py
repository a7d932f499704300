"""Where a prompt's features lie, and which of them are needed together."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from ipc.vocabulary import MultimodalFeature


@dataclass(frozen=True, slots=True)
class FeatureUnit:
    """Features whose outputs a step must have all at once, as far as its tokens reach into `[start, end)`.

    An `indivisible` one consists of embedded tokens that see each other: none of them is computed without the rest.
    """

    start: int
    end: int
    features: tuple[MultimodalFeature, ...]
    indivisible: bool = False

    def needed(self, start: int, end: int) -> list[MultimodalFeature]:
        """Those of its features that have an embedded token at `[start, end)`."""
        return [feature for feature in self.features if start < feature.end and first_embedded(feature, start) < end]


def first_embedded(feature: MultimodalFeature, position: int) -> int:
    """The first position from `position`, which is before the feature's end, whose token is embedded."""
    index = bisect_right(feature.embed_ranges, position - feature.start, key=itemgetter(1))
    return max(position, feature.start + feature.embed_ranges[index][0])


def feature_units(
    features: Sequence[MultimodalFeature], *, joins_touching: bool, all_at_once: bool
) -> tuple[FeatureUnit, ...]:
    """What is needed together, by position: all where a prompt is computed in one step (`all_at_once`), else, with
    `joins_touching` (`MultimodalInfo`), the features of a run of embedded tokens without a gap, else each by itself.
    """
    if not features:
        return ()
    if all_at_once:
        return (FeatureUnit(features[0].start, features[-1].end, tuple(features)),)
    if joins_touching:
        return tuple(_embedded_runs(features))
    return tuple(FeatureUnit(feature.start, feature.end, (feature,)) for feature in features)


def _embedded_runs(features: Iterable[MultimodalFeature]) -> Iterator[FeatureUnit]:
    start = end = -1
    members: list[MultimodalFeature] = []
    for feature in features:
        for first, last in feature.embed_ranges:
            if members and feature.start + first != end:
                yield FeatureUnit(start, end, tuple(members), indivisible=True)
                members = []
            if not members:
                start = feature.start + first
            if not members or members[-1] is not feature:
                members.append(feature)
            end = feature.start + last
    if members:
        yield FeatureUnit(start, end, tuple(members), indivisible=True)
