"""Which component of a request keeps it from sharing more with its longest cached relative."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from frontend.prompt.places import MessagePlace, Place, ToolPlace
from ipc.vocabulary import CacheProbe

from .answers import Component
from .dates import are_dates

_OF_REASONS: dict[str, Component] = {
    "none": "none",
    "continued": "never_stored",
    "not_found": "never_stored",
    "evicted": "evicted",
    "reset": "reset",
    "block_boundary": "block_boundary",
    "read_disabled": "read_disabled",
    "cache_disabled": "cache_disabled",
}
_OF_KINDS: dict[str, Component] = {"mm": "image", "lora": "lora", "cache_salt": "salt"}


@dataclass(frozen=True, slots=True)
class Parting:
    """How request and relative go on behind `before`, which both have; `place` is what of the request stands there.

    `is_prompt` if the request is no chat, so that all of it is its own text. `request_tools` and `relative_tools` are
    the texts that show the tools on both sides, where they part within them.
    """

    before: str
    request: str
    relative: str
    place: Place | None
    is_prompt: bool
    tool_names: Sequence[str] = ()
    request_tools: str | None = None
    relative_tools: str | None = None
    has_calls: bool = False


def component_of(probe: CacheProbe, parting: Parting) -> Component:
    """Of an explained probe."""
    if probe.miss_reason != "diverged":
        return _OF_REASONS[probe.miss_reason]
    assert probe.explanation is not None
    kind = probe.explanation.differing_kind
    if kind is not None:
        return _OF_KINDS.get(kind, "extra_key")
    if are_dates(parting.before, parting.request, parting.relative):
        return "date"
    if parting.request_tools is not None or isinstance(parting.place, ToolPlace):
        return "tool_order" if _is_reordered(parting) else "tool"
    if parting.is_prompt or _is_own_text(parting):
        return "text"
    return "template"


def _is_own_text(parting: Parting) -> bool:
    """Of a message only its parts are its own text, and its calls, which are in no part."""
    place = parting.place
    return isinstance(place, MessagePlace) and (place.part is not None or parting.has_calls)


def _is_reordered(parting: Parting) -> bool:
    """Whether the relative shows the same tools in another order: the same characters, and the names in another one."""
    ours, theirs = parting.request_tools, parting.relative_tools
    if ours is None or theirs is None or sorted(ours) != sorted(theirs[: len(ours)]):
        return False
    names = [f'"{name}"' for name in parting.tool_names]
    return sorted(names, key=ours.find) != sorted(names, key=theirs.find)
